"""Parallelization methods side by side: tables, plots, and Table 2 of the USP paper. Each file imports only earlier
ones:

paper, comparison, tables, plots, document, decision, chart, page.
"""
