"""The traces of a job: tables and sentences, the page, the picture."""

from meshwise.report.trace_page import trace_page as page
from meshwise.report.trace_page import trace_picture as picture
from meshwise.report.trace_table import summary_parts as parts

__all__ = ["page", "parts", "picture"]
