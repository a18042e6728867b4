"""ClusterAvg: a model for each pseudo-domain, averaged over its own clients (as in Sattler et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import UNKNOWN, FitResult, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class ClusterAvg(FedAvg):
    """theta_d <- sum_{S, z_i = d} n_i theta_i / sum_{S, z_i = d} n_i for each pseudo-domain d of Phase 1.

    A client is sent the model of its own pseudo-domain and nothing of the others. A pseudo-domain without a participant
    keeps its model. The run's global model is the mean of all participants' models, as FedAvg's; a client without
    a pseudo-domain is sent that one, and counts for it alone.
    """

    by_domain: ClassVar[bool] = True

    def check_settings(self, experiment: Experiment) -> None:
        """Refuse a joint head: the clients of a model are all of one pseudo-domain."""
        super().check_settings(experiment)
        why = "base with ClusterAvg, which has a model for each pseudo-domain in place of a joint head,"
        require(not experiment.supervision.needs_discovery, "--supervision", why, experiment.supervision.name)

    def init_models(self, weights: Tensors, buffers: Tensors, num_domains: int) -> Record:
        """All models start as the same one."""
        each = [{f"weights{domain}": weights, f"buffers{domain}": buffers} for domain in range(num_domains)]
        return _filled({group: tensors for record in each for group, tensors in record.items()})

    def broadcast(self, server: Record) -> Record:
        """Send nothing besides the client's model."""
        return {}

    def model_of(self, weights: Tensors, buffers: Tensors, server: Record, domain: int) -> tuple[Tensors, Tensors]:
        """Return the model of a pseudo-domain; the global one for a client without a pseudo-domain."""
        if domain == UNKNOWN:
            return weights, buffers
        return server.get(f"weights{domain}", {}), server.get(f"buffers{domain}", {})

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Average the participants of each pseudo-domain, and all of them."""
        everyone = RunningSum()
        sums: dict[int, tuple[RunningSum, RunningSum]] = {}
        for result in results:
            everyone.add(result.weights, self.share(result))
            domain = context.domains.get(result.client, UNKNOWN)
            if domain != UNKNOWN:
                models, statistics = sums.setdefault(domain, (RunningSum(), RunningSum()))
                models.add(result.weights, self.share(result))
                statistics.add(result.buffers, self.share(result))
        record = dict(server)
        for domain, (models, statistics) in sums.items():
            record |= _filled({f"weights{domain}": models.mean(), f"buffers{domain}": statistics.mean()})
        return everyone.mean(), record

    def metrics(self, server: Record, context: RoundContext) -> dict[str, float]:
        """Log nothing: the norms of models say little."""
        return {}


def _filled(record: Record) -> Record:
    """Leave out groups without tensors, which no file can hold."""
    return {group: tensors for group, tensors in record.items() if tensors}
