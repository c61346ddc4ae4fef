"""CLAN, the optimiser of BytePS-Compress (Zhong et al., 2021): LANS fed by the averaged compressed gradient.

>>> import numpy as np
>>> from espresso_mpi.optim import Clan
>>> params = {"w": np.ones(4)}
>>> clan = Clan(params, lr=0.1, weight_decay=0)
>>> grads = {"w": np.array([1, -1, 1, -1], np.float32)}  # what Session.sync made of the ranks' gradients
>>> params = clan.step(grads)
>>> params["w"].round(4).tolist()
[0.9, 1.1, 0.9, 1.1]

A plain reference: whole-array arithmetic in the arrays' own library, no kernels, no MPI.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import buffers
from .errors import ConfigError, GradientError, NonFiniteError, StateError

_LEAST_EPS, _MOST = 1e-30, 1e30


def _lies(value: Any, low: float, high: float) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and low <= float(value) <= high


class Clan:
    """LANS (Zheng et al., 2020) on gradients that are synchronised already. For each tensor x with gradient ĝ::

        g = ĝ/(‖ĝ‖ + ε)
        m ← β₁ m + (1 - β₁) g,  m̂ = m/(1 - β₁ᵗ);  v ← β₂ v + (1 - β₂) g²,  v̂ = v/(1 - β₂ᵗ)
        r = m̂/(√v̂ + ε) + λ x;  u = g/(√v̂ + ε) + λ x
        x ← x - η (β₁ r ‖x‖/‖r‖ + (1 - β₁) u ‖x‖/‖u‖), where a ratio is 1 if one of its norms is 0

    Norms are float64, moments float32. The length of ĝ makes (but for ε) no difference: so a loss scale need not be
    undone, and it does no harm that compression changes it. Where a gradient is None, its tensor is left alone in that
    step. Ranks that start from the same values and run the same libraries with as many threads stay equal to the bit.

    Args:
        params: float32 or float64 arrays in nested lists, tuples and dicts, updated in place. On the CPU all that
            ``Session.sync`` takes. On the GPU torch's tensors, and all others once CuPy is imported: that is what
            computes there. JAX's arrays cannot be changed: go on with what ``step`` returns.
        lr: η. An attribute, to be set between steps.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.

    Raises:
        ConfigError: a number out of its range.
        GradientError: a parameter that cannot be updated; the text names it.

    Example:
        >>> params = {"w": np.ones(4)}
        >>> clan = espresso_mpi.optim.Clan(params, lr=0.1, weight_decay=0)
        >>> params = clan.step({"w": np.array([1, -1, 1, -1], np.float32)})
        >>> params["w"].round(4).tolist()
        [0.9, 1.1, 0.9, 1.1]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        self.lr = lr
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_lies(b, 0, 1) and b < 1 for b in betas):
            raise ConfigError(f"Clan: betas={betas!r}; expected two numbers from 0 to below 1")
        if not _lies(eps, _LEAST_EPS, 1):
            raise ConfigError(f"Clan: eps={eps!r}; expected a number from {_LEAST_EPS:g} (float32 knows no less) to 1")
        if not _lies(weight_decay, 0, _MOST):
            raise ConfigError(f"Clan: weight_decay={weight_decay!r}; expected a number from 0 to {_MOST:g}")
        self._betas, self._eps, self._decay = betas, eps, weight_decay
        self._params = params
        self._moments = {t.name: _Moments(0, t.library.zeros(t), t.library.zeros(t)) for t in _tensors(params)}

    @property
    def lr(self) -> float:
        """The learning rate η of the next step."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not _lies(value, 0, _MOST):
            raise ConfigError(f"Clan: lr={value!r}; expected a number from 0 to {_MOST:g}")
        self._lr = float(value)

    def step(self, grads: Any) -> Any:
        """Update the parameters once.

        Args:
            grads: arrays with the names and shapes of the parameters, or None; of any type that ``Session.sync`` takes.
                An array's name are the keys on the way to it. Not changed.

        Returns:
            The parameters: the same containers, unless they hold arrays that cannot be changed (JAX).

        Raises:
            GradientError: the names or shapes are others than the parameters', or an array cannot be read.
            NonFiniteError: a gradient holds a NaN or an infinity. Nothing has been changed in either case.
        """
        tensors = _tensors(self._params)
        values = _matched(tensors, dict(buffers.flatten(grads)))
        lengths = {t.name: _length(t, values[t.name]) for t in tensors if values[t.name] is not None}
        for tensor in tensors:
            if tensor.name in lengths:
                gradient = _read(tensor, values[tensor.name]) / (lengths[tensor.name] + self._eps)
                self._update(tensor, tensor.library.single(gradient), self._moments[tensor.name])
        self._params = buffers.rebuild(self._params, [tensor.adopted for tensor in tensors])
        return self._params

    def _update(self, tensor: _Tensor, g: Any, moments: _Moments) -> None:
        """One step of one tensor along its normalised gradient."""
        (first, second), x = self._betas, tensor.library.single(tensor.array)
        moments.steps += 1
        m, v = moments.m, moments.v
        m *= first
        m += (1 - first) * g
        v *= second
        v += (1 - second) * (g * g)
        spread = (v / (1 - second**moments.steps)) ** 0.5 + self._eps
        r = m / (1 - first**moments.steps) / spread + self._decay * x
        u = g / spread + self._decay * x
        length = _norm(tensor, x)
        change = (first * _ratio(length, _norm(tensor, r))) * r
        change += ((1 - first) * _ratio(length, _norm(tensor, u))) * u
        array = tensor.array
        array -= self._lr * change

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The number of steps and the moments of each tensor, as numpy arrays: a copy."""
        return {
            t.name: {"steps": own.steps, "m": t.library.to_host(own.m), "v": t.library.to_host(own.v)}
            for t in _tensors(self._params)
            for own in [self._moments[t.name]]
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from what ``state_dict`` returned. The parameters themselves and ``lr`` are the caller's to restore.

        Raises:
            StateError: the state belongs to other parameters, or is damaged. Nothing has been changed then.
        """
        tensors = _tensors(self._params)
        if not isinstance(state, Mapping):
            raise StateError(f"Clan: the state is a {type(state).__name__}; pass what state_dict() returned")
        if set(state) != {t.name for t in tensors}:
            raise StateError(f"Clan: the state {_difference(set(state), tensors)}; load the state of this model")
        loaded = {t.name: _checked(t, state[t.name]) for t in tensors}
        for tensor in tensors:
            steps, m, v = loaded[tensor.name]
            own = self._moments[tensor.name]
            own.steps = steps
            own.m[...], own.v[...] = tensor.library.from_host(tensor, m), tensor.library.from_host(tensor, v)


@dataclass
class _Moments:
    """What is kept of one tensor: how often it was updated, and two flat float32 arrays of its own library."""

    steps: int
    m: Any
    v: Any


@dataclass(frozen=True)
class _Tensor:
    """One parameter: ``array`` is flat, over the caller's memory, and can be computed with."""

    adopted: buffers.Gradient
    library: _NumPy | _Torch
    array: Any

    @property
    def name(self) -> str:
        return self.adopted.spec.name


def _tensors(params: Any) -> list[_Tensor]:
    """The parameters in their order; None becomes an empty tensor, which no step changes."""
    return [_tensor(name, value) for name, value in buffers.flatten(params)]


def _tensor(name: str, value: Any) -> _Tensor:
    adopted = buffers.adopt(name, value)
    if adopted.spec.dtype not in (None, "float32", "float64"):
        raise GradientError(
            f"{name}: got a parameter of type {adopted.spec.dtype}; expected float32 or float64; small steps are lost "
            f"in 16 bits, so update a float32 copy and round that"
        )
    library = _library(name, value, adopted)
    return _Tensor(adopted, library, library.flat(value, adopted))


def _library(name: str, value: Any, adopted: buffers.Gradient) -> _NumPy | _Torch:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _Torch(torch)
    if adopted.spec.device == "cpu":
        return _NumPy(np)
    if cupy is None:
        raise GradientError(
            f"{name}: got a GPU array that is no torch tensor; expected one that can be computed with; import cupy, or "
            f"pass host arrays"
        )
    return _NumPy(cupy)


def _matched(tensors: list[_Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """The gradients by name, if they are those of the parameters."""
    if set(values) != {t.name for t in tensors}:
        raise GradientError(
            f"grads: {_difference(set(values), tensors)}; expected one for each parameter, None where there is none"
        )
    for tensor in tensors:
        value, spec = values[tensor.name], tensor.adopted.spec
        shape = None if value is None else tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        if shape is not None and (spec.dtype is None or shape != spec.shape):
            expected = "None" if spec.dtype is None else f"shape {spec.shape}"
            raise GradientError(
                f"{tensor.name}: got a gradient of shape {shape}; expected {expected}, as its parameter"
            )
    return values


def _difference(names: set[str], tensors: list[_Tensor]) -> str:
    known = {t.name for t in tensors}
    missing, other = sorted(known - names), sorted(names - known)
    parts = [f"lacks {missing[0]!r} and {len(missing) - 1} more"] if missing else []
    parts += [f"has {other[0]!r} and {len(other) - 1} more that no parameter is named"] if other else []
    return ", ".join(parts)


def _read(tensor: _Tensor, value: Any) -> Any:
    """A gradient, flat in float64, where its parameter lives."""
    adopted = buffers.adopt(tensor.name, value)
    if adopted.spec.device == "gpu" and tensor.adopted.spec.device == "cpu":
        raise GradientError(
            f"{tensor.name}: got a gradient on the GPU; expected cpu, as its parameter; move one of them"
        )
    return tensor.library.wide(tensor, value, adopted)


def _length(tensor: _Tensor, value: Any) -> float:
    length = tensor.library.norm(_read(tensor, value))
    if not math.isfinite(length):
        raise NonFiniteError(
            f"{tensor.name}: the gradient holds a NaN, an infinity or values whose squares overflow; expected finite "
            f"ones; skip this step on all ranks, with a lower loss scale if there is one"
        )
    return length


def _norm(tensor: _Tensor, array: Any) -> float:
    return tensor.library.norm(tensor.library.double(array))


def _ratio(length: float, other: float) -> float:
    """The trust ratio: how long the parameters are for the direction's length."""
    return length / other if length > 0 and other > 0 else 1.0


def _checked(tensor: _Tensor, entry: Mapping[str, Any]) -> tuple[int, np.ndarray, np.ndarray]:
    """Steps and moments of one tensor from a saved state."""
    size = tensor.adopted.array.size
    try:
        steps, m, v = int(entry["steps"]), *(np.asarray(entry[key], np.float32) for key in ("m", "v"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{tensor.name}: cannot read its state ({error!r}); load what state_dict returned") from None
    if steps < 0 or m.shape != (size,) or v.shape != (size,) or not (np.isfinite([m, v]).all() and (v >= 0).all()):
        raise StateError(
            f"{tensor.name}: got moments of shape {m.shape} and {v.shape} after {steps} steps; expected finite ones of "
            f"shape ({size},); load the state of this model"
        )
    return steps, m, v


# --- the libraries that compute ---------------------------------------------------------------------------------------


class _NumPy:
    """numpy, or CuPy, which has the same functions."""

    def __init__(self, module: Any) -> None:
        self._np = module

    def flat(self, value: Any, adopted: buffers.Gradient) -> Any:
        return self._np.asarray(adopted.array)

    def wide(self, tensor: _Tensor, value: Any, adopted: buffers.Gradient) -> Any:
        return _values(self._np, adopted)

    def zeros(self, tensor: _Tensor) -> Any:
        return self._np.zeros(tensor.array.size, np.float32)

    def single(self, array: Any) -> Any:
        return array.astype(np.float32, copy=False)

    def double(self, array: Any) -> Any:
        return array.astype(np.float64, copy=False)

    def norm(self, wide: Any) -> float:
        with np.errstate(over="ignore"):
            return math.sqrt(float((wide * wide).sum()))

    def to_host(self, array: Any) -> np.ndarray:
        return np.array(array) if self._np is np else self._np.asnumpy(array)

    def from_host(self, tensor: _Tensor, array: np.ndarray) -> Any:
        return self._np.asarray(array)


class _Torch:
    """torch, on the CPU and on the GPU."""

    def __init__(self, module: Any) -> None:
        self._torch = module

    def flat(self, value: Any, adopted: buffers.Gradient) -> Any:
        if adopted.source is not None:  # strided: a copy, which ``buffers.rebuild`` writes back
            return self._torch.as_tensor(adopted.array, device=value.device)
        return value.detach().view(-1)

    def wide(self, tensor: _Tensor, value: Any, adopted: buffers.Gradient) -> Any:
        if not isinstance(value, self._torch.Tensor):
            if adopted.spec.device == "gpu":
                raise GradientError(
                    f"{tensor.name}: got a gradient of type {type(value).__name__}; expected a torch tensor or a host "
                    f"array for a torch parameter on the GPU; pass torch.as_tensor(x)"
                )
            value = self._torch.from_numpy(_values(np, adopted))
        return value.detach().reshape(-1).to(tensor.array.device, self._torch.float64)

    def zeros(self, tensor: _Tensor) -> Any:
        return self._torch.zeros(tensor.array.numel(), dtype=self._torch.float32, device=tensor.array.device)

    def single(self, array: Any) -> Any:
        return array.to(self._torch.float32)

    def double(self, array: Any) -> Any:
        return array.to(self._torch.float64)

    def norm(self, wide: Any) -> float:
        return math.sqrt(float((wide * wide).sum()))

    def to_host(self, array: Any) -> np.ndarray:
        return np.array(array.cpu().numpy())

    def from_host(self, tensor: _Tensor, array: np.ndarray) -> Any:
        return self._torch.from_numpy(np.array(array)).to(tensor.array.device)


def _values(library: Any, adopted: buffers.Gradient) -> Any:
    """The values of an adopted array as float64, by numpy or CuPy."""
    array = library.asarray(adopted.array)
    if adopted.spec.dtype == "float16":
        array = array.view(np.float16)
    elif adopted.spec.dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
