"""LoRA requests: which adapter's weights their blocks are made with, as a tag in their keys.

vLLM's block hashes hold an adapter's name and path, not its weights, and an engine goes on with the weights that it has
loaded whatever happens to the files. So the digest of the files stands for the weights only while the files are what
they were when the engine loaded them; blocks of any other time are neither stored nor used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from kvtier.keys import MAX_TIER_KEY_BYTES, OffloadKey, extend_key
from kvtier.runtime.identity import AdapterContent, AdapterFiles, FilesChangingError
from kvtier.transfers.bounded import BoundedCalls
from vllm import envs

logger = init_logger(__name__)

LOOK_TIMEOUT_S = 1.0
"""How long the scheduler waits for an adapter's folder. Read the first time, looked at later."""
MAX_ADAPTERS = 65_536
"""What is remembered of; blocks of any adapter after these are neither stored nor used."""
TAG_BYTES = 24
"""Of a digest, in keys: with the longest block hash they are still short enough for every tier."""
_UNKNOWN = b""
_NAME_PATTERN = "kvtier: LoRA adapter %r (%s): %s"
_HOW_TO_CHANGE = "load changed weights from a new path"


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What the engine has loaded under an adapter's number."""

    name: str
    path: str
    is_3d: bool
    content: AdapterContent | None
    """None: the files cannot be read here."""
    tag: bytes

    def is_what(self, request: LoRARequest, content: AdapterContent | None) -> bool:
        """Whether that is what this request asks for, whose files are these now."""
        asked = (request.lora_name, request.lora_path, request.is_3d_lora_weight, content)
        return asked == (self.name, self.path, self.is_3d, self.content)


@dataclass(slots=True)
class AdapterUse:
    """What one request uses of an adapter: the state of its vLLM context."""

    request: LoRARequest
    loaded: _Loaded | None
    """None: nobody knows which weights these are. The request stores nothing and uses nothing."""

    def key(self, key: OffloadKey) -> OffloadKey:
        """vLLM's key, told apart from those of other weights."""
        return extend_key(key, self.loaded.tag) if self.loaded is not None else key


class Adapters:
    """The adapters of one engine, as far as requests and loads have shown them. Called in the scheduler's thread.

    `read(path)` is `read_adapter`, for tests. Nothing here raises.
    """

    def __init__(self, read: Callable[[str], AdapterContent | None] | None = None) -> None:
        self._read = read or functools.partial(read_adapter, AdapterFiles())
        self._calls: BoundedCalls[AdapterContent | None] = BoundedCalls("kvtier-adapters", LOOK_TIMEOUT_S)
        self._seen_now: dict[str, AdapterContent | Exception | None] = {}
        self._loaded: dict[int, _Loaded] = {}
        self._tags: dict[tuple[str, str], bytes] = {}
        """Name and path, which is what vLLM's block hashes hold -> the tag of all blocks in the engine, or unknown."""
        self._said: set[tuple[str, str, str]] = set()

    # -- requests --------------------------------------------------------------------------------------------

    def enter(self, request: LoRARequest) -> AdapterUse:
        """A request with this adapter is there."""
        try:
            content = self._look(request.lora_path)
        except Exception as error:
            self._keep_out(request, f"which weights it has cannot be told ({error}); its blocks are not cached")
            known = self._loaded.get(request.lora_int_id)
            if known is None or request.load_inplace or not known.is_what(request, known.content):
                self._lose(request)  # the engine loads it all the same, and goes on with that
            return AdapterUse(request, None)
        loaded = self._loaded.get(request.lora_int_id)
        if loaded is None or request.load_inplace:
            # the engine loads it for this request; in place: for each of them
            loaded = self._note(request, content)
        elif not loaded.is_what(request, content):
            self._keep_out(
                request, f"not what was loaded; its blocks are not cached until it is loaded again; {_HOW_TO_CHANGE}"
            )
            if not loaded.is_what(request, loaded.content):
                self._lose(request)  # another adapter of this number: the engine may have dropped the first, or not
            loaded = None
        return AdapterUse(request, loaded)

    def check(self, use: AdapterUse, num_computed_tokens: int = 0) -> bool:
        """Whether the request's blocks are still those of its tag. Once they are not, it neither stores nor uses any.

        `num_computed_tokens` of its prompt were found in the engine, where blocks of other weights may be.
        """
        loaded, request = use.loaded, use.request
        if loaded is None:
            return False
        try:
            is_same = self._look(loaded.path) == loaded.content and self._loaded.get(request.lora_int_id) is loaded
        except Exception:
            is_same = False
        if not is_same:
            self._keep_out(request, f"changed while in use; its blocks are not cached now; {_HOW_TO_CHANGE}")
        elif not num_computed_tokens or self._tags[loaded.name, loaded.path] == loaded.tag:
            return True
        use.loaded = None
        return False

    def forget_looks(self) -> None:
        """What has been seen of the files may be past."""
        self._seen_now.clear()

    # -- loads -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, request: LoRARequest) -> Iterator[None]:
        """The engine loads an adapter ahead of its requests, unless it has one of that number already."""
        if request.lora_int_id in self._loaded and not request.load_inplace:
            yield
            return
        before, is_loaded = self._try_to_look(request.lora_path), False
        try:
            yield
            is_loaded = True
        finally:
            after = self._try_to_look(request.lora_path)
            if is_loaded and before == after and not isinstance(after, Exception):
                self._note(request, after)
            else:
                # some ranks may have it, or have something else
                why = f"not loaded, or written to meanwhile; its blocks are not cached; {_HOW_TO_CHANGE}"
                self._keep_out(request, why)
                self._lose(request)

    def close(self) -> None:
        """No request and no load comes any more."""
        _watching.discard(self)
        self._calls.close()

    # -- private ---------------------------------------------------------------------------------------------

    def _note(self, request: LoRARequest, content: AdapterContent | None) -> _Loaded | None:
        """The engine has these weights under this number from now on, or loads them next."""
        name, path, number = request.lora_name, request.lora_path, request.lora_int_id
        before = self._loaded.get(number)
        if before is not None and content is not None and before.is_what(request, content):
            return before
        if content is None:
            if request.load_inplace:
                self._keep_out(request, "its files cannot be read here and may change; its blocks are not cached")
                self._lose(request)
                return None
            self._say(request, "its files cannot be read here: its blocks stay in RAM")
            tag = os.urandom(MAX_TIER_KEY_BYTES)
        else:
            tag = hashlib.sha256(content.digest + bytes([request.is_3d_lora_weight])).digest()[:TAG_BYTES]
        is_new = number not in self._loaded or (name, path) not in self._tags
        if is_new and max(len(self._loaded), len(self._tags)) >= MAX_ADAPTERS:
            self._keep_out(request, f"after {MAX_ADAPTERS} adapters; its blocks are not cached")
            self._lose(request)
            return None
        loaded = self._loaded[number] = _Loaded(name, path, request.is_3d_lora_weight, content, tag)
        if self._tags.setdefault((name, path), tag) != tag:
            self._tags[name, path] = _UNKNOWN
            self._say(
                request,
                "other weights under the same name and path: vLLM may go on with prefix blocks of the old ones, so its "
                f"blocks are cached only for prompts that find nothing in the engine; {_HOW_TO_CHANGE}",
            )
        return loaded

    def _lose(self, request: LoRARequest) -> None:
        """Nobody knows what the engine has under this number from now on, until it is loaded again."""
        if request.lora_int_id in self._loaded or len(self._loaded) < MAX_ADAPTERS:
            self._loaded[request.lora_int_id] = _Loaded("", "", False, None, _UNKNOWN)

    def _keep_out(self, request: LoRARequest, why: str) -> None:
        """Blocks of this name and path in the engine may be of any weights from now on."""
        if len(self._tags) < MAX_ADAPTERS or (request.lora_name, request.lora_path) in self._tags:
            self._tags[request.lora_name, request.lora_path] = _UNKNOWN
        self._say(request, why)

    def _say(self, request: LoRARequest, what: str) -> None:
        """Once for each adapter."""
        line = (request.lora_name, request.lora_path, what)
        if line not in self._said and len(self._said) < MAX_ADAPTERS:
            self._said.add(line)
            logger.warning(_NAME_PATTERN, request.lora_name, request.lora_path, what)

    def _try_to_look(self, path: str) -> AdapterContent | Exception | None:
        self.forget_looks()
        try:
            return self._look(path)
        except Exception as error:
            return error

    def _look(self, path: str) -> AdapterContent | None:
        """The adapter's files as they are now. None: they cannot be read here. Raises if nobody can tell."""
        if path not in self._seen_now:
            try:
                self._seen_now[path] = self._calls(functools.partial(self._read, path))
            except (TimeoutError, FilesChangingError) as error:
                self._seen_now[path] = error
        seen = self._seen_now[path]
        if isinstance(seen, Exception):
            raise seen
        return seen


def read_adapter(files: AdapterFiles, path: str) -> AdapterContent | None:
    """The adapter that vLLM would load from `path`, None if that is not on this machine or cannot be read.

    Raises FilesChangingError.
    """
    try:
        folder = Path(path).expanduser()
        if not folder.exists():
            if envs.VLLM_USE_MODELSCOPE:
                return None
            import huggingface_hub  # noqa: PLC0415

            folder = Path(huggingface_hub.snapshot_download(path, local_files_only=True))
        return files.read(folder)
    except FilesChangingError:
        raise
    except Exception:  # what a hub may raise is not ours to know
        return None


def watch_loads(adapters: Adapters) -> None:
    """Has the engine cores of this process tell of every adapter that they load ahead of requests.

    vLLM tells its connectors of requests only. Of another core's loads too many are told, which does no harm: what
    is noted must still be there when a request comes.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it imports the schedulers, and they connectors

    _watching.add(adapters)
    if hasattr(EngineCore.add_lora, _MARK):  # `__wrapped__` may be somebody else's
        return
    load = EngineCore.add_lora

    @functools.wraps(load)
    def add_lora(self: Any, lora_request: LoRARequest) -> bool:
        with contextlib.ExitStack() as stack:
            for watching in list(_watching):
                stack.enter_context(watching.loading(lora_request))
            return bool(load(self, lora_request))

    setattr(add_lora, _MARK, True)
    EngineCore.add_lora = add_lora


_MARK = "tells_kvtier"
_watching: weakref.WeakSet[Adapters] = weakref.WeakSet()
