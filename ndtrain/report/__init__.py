"""One static page, or an SVG, of the curves of one run or several."""

from ndtrain.report.page import render_page
from ndtrain.report.runs import ReportError, Run, find_runs, read_run
from ndtrain.report.svg import render_svg

__all__ = ["ReportError", "Run", "find_runs", "read_run", "render_page", "render_svg"]
