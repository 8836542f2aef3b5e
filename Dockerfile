# An image for each kind of device (docs/machines.md):
#   docker build -t samecurve:cuda .
#   docker build -t samecurve:cpu --build-arg TORCH_INDEX=ADDRESS .    the index of torch's CPU builds
#   docker build -t samecurve:rocm --build-arg BASE=rocm/pytorch .     this base brings its torch
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=
ARG EXTRAS=
WORKDIR /opt/samecurve
COPY . .
RUN python3 -m venv --system-site-packages /opt/environment
ENV PATH=/opt/environment/bin:$PATH
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch
RUN pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}"
WORKDIR /work
RUN samecurve examples
RUN samecurve check --devices cpu:2
ENTRYPOINT ["samecurve"]
CMD ["check"]
