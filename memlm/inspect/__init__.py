"""The roles of a model's heads, by their attention and by their weights."""

from memlm.inspect.findings import Ablation, Advice, AttentionMap, Head, Inspection, Role
from memlm.inspect.inspection import inspect_model
from memlm.inspect.report import report_html

__all__ = ["Ablation", "Advice", "AttentionMap", "Head", "Inspection", "Role", "inspect_model", "report_html"]
