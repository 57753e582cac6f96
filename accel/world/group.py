"""The protocol between a world and a backend: one rank's end of a communicator.

A *world* is a list of devices, each of which is a *rank*. An *epoch* is the life of one
communicator. For each epoch the world's controller, in the service's process, does this:

1. It asks the context of rank 0 for :meth:`FormsGroups.unique_id`.
2. It has the context of each rank :meth:`FormsGroups.join` with that id, all at the same time. The
   world is READY when all have returned a :class:`Group`.
3. It sends collectives, as ops of the library ``"collective"`` (see :mod:`accel.ops.collective`),
   to all ranks of one world in one loop iteration. So they come in the same order everywhere. The
   kernel of such an op calls :meth:`Group.launch`. In one context all collectives, of all worlds,
   go into one lane, which is named ``"collective"``.
4. When a rank is lost, a launch raises, or the world is closed, it has each context that is left
   call :meth:`Group.revoke` and then :meth:`Group.abort`, once each, on a worker thread and
   outside the order of ops. Nothing is launched in this epoch after that. What was in flight has
   failed for the controller, whatever the stream says. Ranks join the next epoch meanwhile; it
   begins when all have joined it, and have left the last one.

All this happens in the process that has the context: a child, or the service itself with
``host="inline"``. ``Members``, in this package, makes the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import threading

    from accel.ops.collective import Call

__all__ = ["FormsGroups", "Group"]


class Group(Protocol):
    """One rank's end of a communicator, in one epoch.

    Attributes
    ----------
    rank, size : int
        The number of this rank, from 0, and how many there are.
    reached : int
        The :attr:`Call.number` of the newest call that this rank has come to: where the backend can
        tell, once the stream is there, else once it was launched. 0 before the first, and calls
        without a number leave it. Read on any thread.
    """

    rank: int
    size: int
    reached: int

    def launch(self, stream: Any, call: Call, source: int, target: int) -> None:
        """Enqueue one collective into a stream, behind what is there.

        Called in the order of the collectives, by one thread at a time: the loop's thread, or a
        worker thread where :attr:`FormsGroups.launch_blocks`. It does not wait for other ranks to
        reach the collective.

        Parameters
        ----------
        stream
            The backend's own stream: that of the lane, or one that a library is captured in.
        call
            What to do.
        source, target
            Addresses of what this rank gives and of what it gets; 0 where it has none, as
            :class:`~accel.ops.collective.Call` says. They may be equal in an ``all_reduce``,
            ``reduce`` or ``broadcast``, and are apart otherwise.

        Raises
        ------
        AccelError
            If it was not enqueued, also because the group was revoked, or knows of an error on
            another rank or a link. The controller then begins another epoch, unless the error is a
            fault of the context. A group need not notice that a rank has died: the controller
            watches the processes.
        """

    def revoke(self) -> None:
        """End what is in flight and what waits, so that the stream goes on; the results mean nothing.

        May block for as long as that takes, about a second. Called on a worker thread, perhaps
        while a launch is running on another one, which then returns or raises soon.
        """

    def abort(self) -> None:
        """Release everything. Called on a worker thread, after :meth:`revoke`; may block. Idempotent.

        Other ranks may be dead, and need not call it. No launch is running any more.
        """


@runtime_checkable
class FormsGroups(Protocol):
    """What an :class:`accel.backend.AccelDevice` has besides if it can be a rank of a world.

    Attributes
    ----------
    launch_blocks : bool
        Whether :meth:`Group.launch` may block, so that it is called on a worker thread.
    """

    launch_blocks: bool

    def unique_id(self) -> bytes:
        """Return an id for one communicator, made by rank 0, at most 4 KiB. May block: a worker thread.

        What it holds open, such as a socket that others connect to, is released when rank 0 has
        joined with it, and at the latest when the context is closed: a join may never come.
        """

    def join(self, unique_id: bytes, rank: int, size: int, deadline: float, revoked: threading.Event) -> Group:
        """Make this rank's end of the communicator, and return it once all ranks have joined.

        Called on a worker thread, perhaps while the group of the last epoch is revoked and aborted
        on another one. Other ranks may be dead by now, or never join.

        Parameters
        ----------
        unique_id
            The same for all ranks.
        rank, size
            The number of this rank, from 0, and how many there are.
        deadline
            When to give up, by ``time.monotonic()`` of this process.
        revoked
            Once it is set, give up soon: within 0.1 s where nothing hangs in the driver.

        Raises
        ------
        AccelError
            If there is no group: then nothing of it is left.
        """
