"""Evaluation of models and layouts: held-out NLL, paired comparison by document, ranking, and downstream tasks."""
