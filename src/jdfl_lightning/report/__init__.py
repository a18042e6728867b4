"""Run folders -> tables and figures. Reads files only.

A report is three tables, each derived from the one before:

1. `collect.read_runs`: a line for each run and round, with the columns of ``metrics.csv`` (bytes are sums up to the
   round) and ``best``, true in one line of each run. The same in all lines of a run are ``folder``, ``seed``,
   ``algorithm`` (the name of its class), ``supervision``, ``num_domains`` (M, as set or found), ``data`` (checksum of
   the images and their partition) and its settings: ``section`` (those that define the experiment), ``joint`` (those
   of the joint head that the supervision uses) and ``training`` (all others, which the baseline shares).
2. `comparison.compare`: a line for each quantity of each row of a report, over the seeds: ``report.csv``.
3. `tables`: columns of text, chosen from those lines, which `markup.render` writes as Markdown, LaTeX and HTML by the
   templates in ``templates/``.
"""
