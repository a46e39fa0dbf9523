"""What a training step sends, keeps and takes, by formula and by a dry run, and the layout that is fastest. Each file
imports only earlier ones:

job, methods, traffic, time, memory, dry_run, planner, compare.
"""
