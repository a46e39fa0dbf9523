"""One GPU: is what it computes right, how fast are its parts, what does a step take; beside what was expected.

    python -m benchmarks.gpu --output runs/gpu                # about seven minutes on an H200
    python -m benchmarks.gpu --device cpu --tiny              # a rehearsal of the same code on toy sizes

    __main__    flags
    runner      every section as a process with a limit; what has ended well is not run again
    sections    the sections, in the order of what they tell per second, with their expected seconds
    expected    every figure that is expected, with its source and tolerance
    worker      the process of one section
    summary     summary.md

The others hold the sections. Importing this package, the runner or the worker imports no torch.
"""
