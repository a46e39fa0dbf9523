# docker build -t usp . && docker run --gpus all --ipc host -v "$PWD/models:/workspace/models" usp \
#     torchrun --nproc-per-node 8 train.py --config configs/llama3-8b-128k.yaml
# torch's wheel brings CUDA's libraries. One for another CUDA comes from a package index of your choice, the build argument
# PIP_EXTRA_INDEX_URL. vLLM chooses its own torch, so the extra vllm does not agree with constraints.txt.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

# A compiler and Python's headers, for the kernels that torch.compile writes. Ubuntu keeps no older versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 usp

# At least one of the extras of setup.py.
ARG EXTRAS=lora,fp8,math
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/usp
COPY setup.py pyproject.toml README.md LICENSE constraints.txt ./
COPY attention attention
COPY parallel parallel
COPY usp usp
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" \
    && rm -rf /opt/usp
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

WORKDIR /workspace
COPY train.py rlhf.py ./
COPY configs configs
RUN chown -R usp /workspace
USER 10001
CMD ["usp-train", "--help"]
