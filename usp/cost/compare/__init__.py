"""Methods of parallelism side by side: tables, plots, and the paper's own Table 2. Each file imports only earlier
ones:

paper, comparison, tables, plots, document, page.
"""
