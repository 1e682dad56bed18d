# The image of the operator and of jobs that need no GPU. For GPUs, let jobs use an image with CUDA's torch, and install
# Meshwright there in the same way.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY meshwright meshwright
RUN python -m venv /opt/meshwright \
 && /opt/meshwright/bin/pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
        "torch==2.13.0+cpu" ".[k8s]"

FROM python:3.12-slim
# openssl: the scheduler makes a certificate for each job
RUN apt-get update && apt-get install -y --no-install-recommends openssl && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home meshwright
COPY --from=build /opt/meshwright /opt/meshwright
COPY examples /work/examples
ENV PATH=/opt/meshwright/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /work
USER 10001
ENTRYPOINT []
CMD ["meshwright", "--help"]
