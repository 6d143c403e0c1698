"""The packages of PyPI in the table, and those that were tried and left out."""

from __future__ import annotations

import dataclasses
import types
import typing as tp


@dataclasses.dataclass(frozen=True)
class Package:
    """A package, at one version. Its program is `programs/uses_NAME.py`."""

    name: str
    version: str
    about: str
    needs: tuple[str, ...] = ()
    """What it imports, beside JAX, Flax, Optax and Orbax; it is installed without its dependencies."""

    environ: tp.Mapping[str, str] = types.MappingProxyType({})
    note: str = ""

    @property
    def program(self) -> str:
        return f"uses_{self.name.replace('-', '_')}.py"


PACKAGES = (
    Package("blaxbird", "0.2.0", "training loop: ten steps"),
    Package("dantinox", "0.4.14", "language models: training step", ("pyyaml", "msgpack", "tqdm")),
    Package("faustax", "0.0.1", "audio effects: fitting a compressor", ("librosa", "safetensors")),
    Package("flax-metrics", "0.4.0", "metrics: a jitted update"),
    Package("google-metrax", "0.2.4", "metrics: an eager update", ("clu",)),
    Package("jax-image-models", "0.4.0", "image models: training step", ("tokamax", "safetensors")),
    Package("jraphx", "0.1.0", "graph networks: training step"),
    Package("mamba2-jax", "1.1.2", "state-space models: training step"),
    Package("mamba3-jax", "1.0.1", "state-space models: training step"),
    Package("nnx-ppo", "0.3.0", "PPO: a step with its rollout", ("jaxtyping",)),
    Package("numpyro", "0.22.0", "Bayesian networks: SVI step", ("multipledispatch", "tqdm")),
    Package("qwix", "0.1.8", "quantized training step", ("opt_einsum", "absl-py")),
    Package("synecdoche", "0.2.0", "hypernetworks: training step"),
    Package("tensor-optix", "1.17.9", "PPO: an episode and its updates", ("gymnasium",)),
)
