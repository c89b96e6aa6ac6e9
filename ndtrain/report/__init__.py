"""One static page, an SVG, or a CSV of the curves of one run or several."""

from ndtrain.report.curves_csv import render_csv
from ndtrain.report.page import render_page
from ndtrain.report.runs import ReportError, Run, find_runs, read_run
from ndtrain.report.svg import render_svg

__all__ = ["ReportError", "Run", "find_runs", "read_run", "render_csv", "render_page", "render_svg"]
