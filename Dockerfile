# ndtrain on top of an image that has PyTorch. From the root of a checkout:
#
#   docker build --build-arg BASE=pytorch/pytorch:TAG --tag ndtrain .
#   docker run --rm --gpus all --ipc=host --volume "$PWD/runs:/train/runs" ndtrain train recipe=llama_debug
#
# BASE needs Python 3.11 or later, torch>=2.11,<2.14 and, for compiled blocks, a C compiler: a -devel image of PyTorch.
# Its torch stays: pip stops if pyproject.toml does not accept it. This file is checked by tests/test_release.py, not built.
ARG BASE
FROM ${BASE}

WORKDIR /opt/ndtrain
COPY pyproject.toml README.md LICENSE ./
COPY ndtrain ndtrain
COPY recipes recipes
COPY conf conf

# recent images mark their Python as managed by the distribution
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -c "import torch; print(f'torch=={torch.__version__}')" >constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint constraints.txt '.[hf,tensorboard]' \
    && ndtrain --version

WORKDIR /train
ENTRYPOINT ["ndtrain"]
CMD ["--help"]
