"""The methods of :class:`~accel.Device` for models, and for values that it keeps by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from accel.models import Model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from accel.engine.core import DeviceCore
    from accel.models import TensorSpec
    from accel.models.runner import ModelDevice
    from accel.residents import Residents

__all__ = ["ModelMethods"]

T = TypeVar("T")


class ModelMethods:
    """The methods of :class:`~accel.Device` for models and residents; a base class of it."""

    _core: DeviceCore
    _residents: Residents

    async def load_model(
        self,
        target: Any,
        *,
        weights: Any = None,
        inputs: Mapping[str, TensorSpec] | None = None,
        buckets: Mapping[str, Iterable[int]] | None = None,
        graphs: Literal["auto", "off"] = "auto",
        options: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        outputs: Sequence[str] | None = None,
        batch_axis: int | Mapping[str, int | None] | None = None,
        on_progress: Callable[[str, int, int], object] | None = None,
    ) -> Model:
        """Load a model and return it, ready: it has run once on every bucket.

        Parameters
        ----------
        target
            ``"package.module:name"``, or what has that name: a function that returns a
            ``torch.nn.Module``, or a class with ``open`` and ``run``
            (:class:`accel.models.Adapter`); or a path that ends in ``.onnx``. Or a coroutine
            function itself (not its name), ``async def function(device, *, x, weights)``, that
            returns refs: it gets the inputs as refs by name, and the weights, if there are any, as
            a mapping of durable refs, and runs in this process.
        weights
            A ``.safetensors`` file, a folder of them or their index; a file of ``torch.save``; a
            mapping of names to arrays or tensors; or a list of these. ``None``: those that the
            model is built with, or that are in the ONNX file.
        inputs
            A :class:`~accel.TensorSpec` for each input, in the order in which the model takes them;
            ``None``: as an ONNX file says.
        buckets
            For named dimensions, the lengths that inputs are padded to: ``{"batch": (1, 8, 64)}``.
        graphs
            ``"auto"``: the forwards of torch modules on CUDA are captured into graphs, one for each
            bucket, if all dimensions have buckets; what cannot be captured runs eagerly, and the
            log says why. ``"off"``: all runs eagerly.
        options
            More keyword arguments of the adapter: of a torch module ``train`` and ``threads``; of a
            class or a coroutine function, its own.
        imports
            Modules that the model imports only when it is built or run, such as
            ``"transformers.models.bert.modeling_bert"``. Spare children and quarantines are forked
            from a process that has imported them (and the module of ``target``).
        outputs
            Names of the outputs that are wanted, of a tuple their places; ``None``: all.
        batch_axis
            Dimension along which outputs are split among requests: of all, or by name; ``None`` for
            one says that it is common to all. What is not named here is found out by runs at
            several batch sizes, which a model of one batch size cannot do.
        on_progress
            Called on the loop with three arguments: what is being made, how much of it is done, how
            much there is: with ``"weights"`` and bytes while these are put on the device; then with
            ``"buckets"``, in each of which the model is run once, which compiles and captures what
            it needs. What it raises ends the load.

        Raises
        ------
        InvalidArgumentError
            The target, the weights, the inputs or the buckets mean nothing, or do not go together.
            Or an output can neither be split among the requests of a batch nor given to each: the
            message names it.
        BackendUnavailableError
            The framework is not installed in the process where the model lives.
        LibraryError
            The model could not be built or run.
        OutOfMemoryError
            There is no room for the weights.
        UnsupportedError
            The device has no durable buffers, in which the weights are kept.

        Notes
        -----
        After an error or a cancellation nothing is left on the device.
        """
        self._core.guard()  # before gigabytes of weights are read
        return await Model.load(
            cast("ModelDevice", self),
            target,
            weights=weights,
            inputs=inputs,
            buckets=buckets,
            graphs=graphs,
            options=options,
            imports=imports,
            outputs=outputs,
            batch_axis=batch_axis,
            on_progress=on_progress,
            system=self._core.system,
        )

    async def resident(self, name: str, loader: Callable[[Self], Awaitable[T]], *, durable: bool = False) -> T:
        """Return a named value, such as a model's weights, which the device keeps.

        Load it if it is not there.

        Parameters
        ----------
        name
            Of the value, on this device.
        loader
            ``async def loader(device)`` that puts the data on the device and returns a ref, or any
            structure of refs and other things. It is called for the first caller, and for the first
            one after a rebuild has invalidated the value, or one of its refs was freed.
        durable
            The value outlives faults: its refs must be durable, and it is loaded again only if one
            of them is torn.

        Raises
        ------
        InvalidArgumentError
            With ``durable``, if a ref in the value is not durable: the message names the first. If
            the name was asked for with another ``durable``. If loaders wait for each other in a
            circle.
        UnsupportedError
            With ``durable``, if this device has no durable buffers.
        ClosedError, DeviceLostError
            The device ended before the value was there.
        Exception
            What the loader raised: all waiters get it; the next call loads again.

        Notes
        -----
        All callers during a load wait for that load; cancelling one of them, or all, does not end
        it. It begins once the device is READY. A load that is interrupted by a rebuild begins anew,
        unless one of its ops was on the device at the fault: its error is raised then. Nothing is
        loaded before the first call. Refs are looked for in mappings, lists, tuples, sets and
        dataclasses.
        """
        result: T = await self._residents.get(name, loader, durable=durable)
        return result

    def evict(self, name: str) -> bool:
        """Release a resident, and return whether there was one.

        Its memory is freed when the last of its refs is dropped; waiters of its load get it.
        """
        return self._residents.evict(name)
