"""How often are the digits' four domains found among ten groups without federation?

    python benchmarks/group_discovery.py --seeds 16

Each seed draws split, weights and order anew; 16 px, the paper's CNN, lr 0.05, E_0 = 3, M by elbow.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.metrics import adjusted_rand_score
from torch.utils.data import DataLoader, TensorDataset

from jdfl_lightning import DigitsDomains, JointModule, PaperCNN, discover_domains
from jdfl_lightning.data.transforms import to_input

SIZE = 16


def main() -> None:
    """Discover with each seed and print M and ARI."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16, help="how many, from 0")
    options = parser.parse_args()
    exact = 0
    for seed in range(options.seeds):
        data = DigitsDomains(size=SIZE, num_clients=10)
        parts = data.deal(seed).clients
        loaders = {
            str(group): DataLoader(
                TensorDataset(to_input(data.images[part]), data.labels[part]), batch_size=32, shuffle=True
            )
            for group, part in enumerate(parts)
        }
        torch.manual_seed(seed)
        found = discover_domains(JointModule(PaperCNN(SIZE), 128, 10, lr=0.05), loaders, seed=seed)
        ari = adjusted_rand_score(data.partition.client_domains, list(found.assignments.values()))
        print(f"seed {seed}: M = {found.num_domains} ({found.found.criterion}), ARI {ari:.2f}", flush=True)
        exact += ari == 1
    print(f"exactly the four domains in {exact} of {options.seeds}")


if __name__ == "__main__":
    main()
