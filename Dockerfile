# The image of the operator and of jobs. torch comes with CUDA; for a smaller image name an index that has it without:
# docker build --build-arg PIP_EXTRA_INDEX_URL=… .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY meshwright meshwright
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/meshwright \
 && /opt/meshwright/bin/pip install --no-cache-dir -c constraints.txt torch==2.13.0 ".[k8s]"

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
