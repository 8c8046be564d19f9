"""The private names of other libraries that we use: each exists and does what we need."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from tiny_models import LAYERS, PROMPTS, tiny_model
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.modeling_utils import AttentionInterface

from depthdecay import library_internals as internals
from depthdecay.errors import DepthDecayError, MissingNameError

SOURCE = Path(internals.__file__).parent


def generate(model: Any, new_tokens: int = 3, **settings: Any) -> Any:
    ids = torch.tensor(PROMPTS[:1])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings)


class TestMissingNames:
    def test_the_error_names_library_version_and_name(self) -> None:
        with pytest.raises(MissingNameError, match=r"^transformers 5\.\d+\.\d+\S* has no LlamaForCausalLM\._gone, "):
            internals.required(tiny_model(), "_gone", "transformers")
        with pytest.raises(MissingNameError, match=r"^torch 2\.\d+\.\d+\S* has no module torch\._gone, "):
            internals._imported("torch._gone", "thing", "torch")
        assert issubclass(MissingNameError, DepthDecayError)

    def test_a_library_that_is_not_installed_is_another_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(name: str, *_args: Any, **_kwargs: Any) -> Any:
            raise ModuleNotFoundError(f"No module named '{name}'", name="triton")

        monkeypatch.setattr(builtins, "__import__", fails)
        with pytest.raises(ModuleNotFoundError, match="torch"):
            internals._imported("torch._dynamo", "OptimizedModule", "torch")

    @pytest.mark.parametrize(
        "name",
        ["_prepare_generation_config", "_prepare_special_tokens", "_get_logits_processor"],
    )
    def test_each_method_of_generate_is_missed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(GenerationMixin, name)
        model = tiny_model()

        def complete_and_process() -> None:
            config = internals.completed_generation_config(model, None)
            internals.logits_processors(model, config, torch.tensor(PROMPTS[:1]), None)

        with pytest.raises(MissingNameError, match=rf"LlamaForCausalLM\.{name}"):
            complete_and_process()


class TestAttention:
    def test_the_name_says_what_a_model_dispatches_to(self) -> None:
        assert internals.attention_name(tiny_model().config) == "sdpa"
        assert internals.attention_name(tiny_model(attn_implementation="eager").config) == "eager"

    def test_a_model_asks_for_the_name_that_it_was_given(self) -> None:
        model, asked = tiny_model(), []
        plain = internals.attention_function("sdpa")
        assert plain is not None

        def attend(*args: Any, **kwargs: Any) -> Any:
            asked.append(args[4])
            return plain(*args, **kwargs)

        expected = generate(model)
        with internals.attention_registered("ours", attend), internals.attention_named(model.config, "ours"):
            assert internals.attention_name(model.config) == "ours"
            generate(model)
        assert len(asked) == 3 * LAYERS
        assert asked == [None] * len(asked)  # transformers builds no masks for names that it does not know
        assert internals.attention_name(model.config) == "sdpa"
        assert internals.attention_function("ours") is None
        assert generate(model).tolist() == expected.tolist()
        assert len(asked) == 3 * LAYERS

    def test_eager_attention_is_what_a_model_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, calls = tiny_model("gemma2", attn_implementation="eager"), []
        module = model.model.layers[0].self_attn
        plain = internals.eager_attention(module)
        monkeypatch.setattr(
            sys.modules[type(module).__module__],
            plain.__name__,
            lambda *args, **kwargs: calls.append(kwargs["softcap"]),
        )
        with pytest.raises(TypeError):  # the recording stub returns None
            generate(model)
        assert calls == [model.config.attn_logit_softcapping]

    def test_a_registered_function_is_put_back(self) -> None:
        model, calls = tiny_model(), []
        plain = internals.attention_function("sdpa")
        assert plain is not None

        def attend(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > LAYERS:
                raise RuntimeError("in the second step")
            return plain(*args, **kwargs)

        with pytest.raises(RuntimeError, match="second step"), internals.attention_registered("sdpa", attend):
            generate(model)
        assert internals.attention_function("sdpa") is plain
        assert AttentionInterface()["sdpa"] is plain


class TestGenerate:
    @pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 2}, {"do_sample": True}])
    def test_it_reads_the_prompt_and_nothing_else_in_prefill(self, settings: dict[str, Any]) -> None:
        model = tiny_model()
        read: list[tuple[bool, int]] = []
        inside = [False]
        prefill, forward = internals.method(model, internals.PREFILL), model.forward

        def watched_prefill(*args: Any, **kwargs: Any) -> Any:
            inside[0] = True
            try:
                return prefill(*args, **kwargs)
            finally:
                inside[0] = False

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            read.append((inside[0], kwargs["input_ids"].shape[1]))
            return forward(*args, **kwargs)

        model.__dict__[internals.PREFILL] = watched_prefill
        model.forward = watched_forward
        generate(model, new_tokens=4, **settings)
        in_prompt = [length for was_inside, length in read if was_inside]
        assert sum(in_prompt) == len(PROMPTS[0])
        assert len(in_prompt) == (1 if "prefill_chunk_size" not in settings else -(-len(PROMPTS[0]) // 2))
        assert read[len(in_prompt) :] == [(False, 1)] * 3

    def test_compiled_steps_go_through_the_method_that_we_replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a CPU generate compiles nothing by itself, so the test forces it."""
        model, asked = tiny_model(), []
        monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *_: True)

        def get_compiled_call(*_args: Any) -> Any:
            asked.append(1)
            return model.__call__

        internals.method(model, "get_compiled_call")
        model.__dict__["get_compiled_call"] = get_compiled_call
        generate(model)
        assert asked

    def test_settings_are_completed_from_the_models_own(self) -> None:
        model = tiny_model()
        model.generation_config.repetition_penalty = 1.5
        config = internals.completed_generation_config(model, None, temperature=0.5, do_sample=True)
        assert (config.repetition_penalty, config.temperature, config.do_sample) == (1.5, 0.5, True)
        given = internals.completed_generation_config(model, GenerationConfig(top_k=3))
        assert (given.top_k, given.repetition_penalty) == (3, 1.5)
        assert model.generation_config.temperature != 0.5

    def test_processors_are_those_of_generate(self) -> None:
        def own(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 1

        model, ids = tiny_model(), torch.tensor(PROMPTS[:1])
        config = internals.completed_generation_config(model, None, suppress_tokens=[5], eos_token_id=2)
        processors = internals.logits_processors(model, config, ids, [own])
        assert isinstance(processors, LogitsProcessorList)
        scores = processors(ids, torch.zeros(1, 97))
        assert scores[0, 5] == -torch.inf
        assert scores[0, 6] == 1
        plain = internals.completed_generation_config(model, None)
        assert not internals.logits_processors(model, plain, ids, None)

    def test_states_of_a_models_own_are_told_from_keys_and_values(self) -> None:
        from transformers import RwkvForCausalLM

        assert internals.takes_dynamic_cache(tiny_model())
        assert not internals.takes_dynamic_cache(RwkvForCausalLM)

    def test_experts_are_changed_for_decoding_and_changed_back(self) -> None:
        """On the meta device, since on a CPU transformers changes nothing."""
        model = tiny_model("mixtral").to("meta")
        model.set_experts_implementation("grouped_mm")
        before = model.get_experts_implementation()
        assert "grouped_mm" in before.values()
        with internals.optimized_for_decoding(model):
            assert "batched_mm" in model.get_experts_implementation().values()
        assert model.get_experts_implementation() == before


class TestTorch:
    def test_a_compiled_model_is_unwrapped(self) -> None:
        model = tiny_model()
        compiled = torch.compile(model)
        assert compiled is not model
        assert internals.uncompiled(compiled) is model
        assert internals.uncompiled(model) is model
        assert dict(compiled.named_children())[internals.COMPILED_PART] is model
        assert next(iter(compiled.state_dict())).startswith(f"{internals.COMPILED_PART}.")

    def test_hooks_are_counted(self) -> None:
        layer = torch.nn.Linear(1, 1)
        assert internals.forward_hooks(layer) == (0, 0)
        before = layer.register_forward_pre_hook(lambda *_: None)
        layer.register_forward_hook(lambda *_: None)
        layer.register_forward_hook(lambda *_: None)
        assert internals.forward_hooks(layer) == (1, 2)
        before.remove()
        assert internals.forward_hooks(layer) == (0, 2)

    def test_torch_itself_clears_workspaces_by_the_name_that_we_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import cudagraph_trees

        assert "torch._C._cuda_clearCublasWorkspaces()" in inspect.getsource(cudagraph_trees)
        if not torch.backends.cuda.is_built():
            with pytest.raises(MissingNameError, match="_cuda_clearCublasWorkspaces"):
                internals.clear_cublas_workspaces()
            cleared: list[int] = []
            monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False)
            internals.clear_cublas_workspaces()
            assert cleared == [1]

    @pytest.mark.cuda
    def test_workspaces_are_cleared(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")
        weight = torch.ones(64, 64, device="cuda")
        internals.clear_cublas_workspaces()  # left by earlier tests
        before = torch.cuda.memory_allocated()
        weight @ weight
        internals.clear_cublas_workspaces()
        assert torch.cuda.memory_allocated() == before

    def test_the_public_names_that_stand_for_private_ones_do_the_same(self) -> None:
        import torch._dynamo

        default = torch._dynamo.config.recompile_limit
        with torch.compiler.config.patch(recompile_limit=default + 56):
            assert torch._dynamo.config.recompile_limit == default + 56
        assert torch._dynamo.config.recompile_limit == default
        calls: list[bool] = []
        watched = torch.compiler.disable(lambda x: calls.append(torch.compiler.is_compiling()) or x)
        torch.compile(lambda x: watched(x) + 1, backend="eager")(torch.ones(1))
        assert calls == [False]


class TestExperts:
    def test_a_model_asks_for_the_experts_that_it_was_given(self) -> None:
        from transformers.integrations import moe

        model, calls = tiny_model("mixtral"), []
        before = model.config._experts_implementation

        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return moe.batched_mm_experts_forward(*args, **kwargs)

        expected = generate(model)
        internals.register_experts("ours", run)
        try:
            with internals.experts_named(model.config, "ours"):
                assert generate(model).tolist() == expected.tolist()
        finally:
            del moe.ExpertsInterface._global_mapping["ours"]
        assert len(calls) == 3 * LAYERS
        assert model.config._experts_implementation == before


class TestInductor:
    def test_a_pass_of_ours_is_one_that_inductor_caches(self) -> None:
        from torch._inductor import codecache

        from depthdecay.cuda.gemv_pass import GemvPass

        made = GemvPass(overlap=False)
        assert isinstance(made, internals.graph_pass_class())
        assert codecache.CustomGraphPass is internals.graph_pass_class()  # which decides what it caches
        assert made.uuid() == GemvPass(overlap=False).uuid() != GemvPass(overlap=True).uuid()

    def test_a_pass_is_called_with_the_traced_graph(self) -> None:
        seen: list[Any] = []
        Base = internals.graph_pass_class()

        class Watching(Base):
            def __call__(self, graph: torch.fx.Graph) -> None:
                seen.extend(node.target for node in graph.nodes)

            def uuid(self) -> Any:
                return None  # nothing is cached, so it is called

        compiled = torch.compile(
            lambda x, w: x @ w, options={"post_grad_custom_pre_pass": Watching(), "triton.enable_pdl": False}
        )
        compiled(torch.ones(1, 8), torch.ones(8, 8))
        assert torch.ops.aten.mm.default in seen

    def test_sizes_that_vary_take_one_compilation(self) -> None:
        """The first compilation already serves all sizes, also where two sizes coincide."""
        torch._dynamo.reset()
        graphs: list[Any] = []
        backend = lambda graph, _inputs: (graphs.append(graph), graph.forward)[1]  # noqa: E731
        compiled = torch.compile(lambda x, w: torch.nn.functional.linear(x, w), backend=backend)
        weight = torch.ones(5, 4)
        for tokens in (4, 2, 5, 16):
            x = torch.ones(1, tokens, 4)
            internals.vary_sizes(x, (1,))
            assert compiled(x, weight).shape == (1, tokens, 5)
        assert len(graphs) == 1

    def test_a_backend_that_fails_raises_what_is_expected(self) -> None:
        def broken(graph: Any, inputs: Any) -> Any:
            raise ValueError("no compiler here")

        with pytest.raises(internals.compilation_errors(), match="no compiler here"):
            torch.compile(lambda x: x + 1, backend=broken)(torch.ones(3))

    def test_a_key_changes_with_a_files_text(self, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("a", "b")]
        for file in files:
            file.write_text(file.name)
        keys = [internals.files_key((str(file),), extra="") for file in files]
        assert len({*keys, internals.files_key((str(files[0]),), extra="more")}) == 3

    def test_generated_kernels_ask_where_to_wait(self) -> None:
        """With a stand-in for a kernel: real ones are only generated for CUDA."""
        kernel_class = internals._waiting_kernel()
        original = kernel_class._handle_pdl_before_access
        for method in ("load", "store"):
            assert "self._handle_pdl_before_access(" in inspect.getsource(getattr(kernel_class, method))
        lines: list[str] = []
        buffer = SimpleNamespace(writeline=lines.append)
        with internals.kernel_waits(lambda kernel, buffer: buffer.writeline(kernel.GDC_WAIT)):
            for enabled in (True, False):
                kernel = SimpleNamespace(GDC_WAIT=kernel_class.GDC_WAIT, _enable_pdl_codegen=lambda: enabled)  # noqa: B023
                kernel_class._handle_pdl_before_access(kernel, buffer, "a buffer", consider_reads=True)
        assert lines == ["tl.extra.cuda.gdc_wait()"]
        assert kernel_class._handle_pdl_before_access is original
        # The other attributes of a kernel that `overlap` uses.
        source = inspect.getsource(kernel_class)
        assert all(f"self.{name}" in source for name in ("inside_reduction", "range_trees", "body.writeline"))

    @pytest.mark.parametrize(
        ("hint", "size", "cooperative", "whole"),
        [
            ("INNER", sympy.Integer(4096), False, True),
            ("INNER", sympy.Integer(4097), False, False),
            ("INNER", sympy.Symbol("s"), False, False),
            ("INNER", sympy.Integer(4096), True, False),
            ("OUTER", sympy.Integer(4096), False, False),
        ],
    )
    def test_generated_kernels_hold_whole_rows(
        self, hint: str, size: Any, cooperative: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torch._inductor.choices import InductorChoices
        from torch._inductor.codegen.triton import TritonKernel
        from torch._inductor.runtime.hints import ReductionHint

        name = "should_use_persistent_reduction"
        assert list(inspect.signature(getattr(InductorChoices, name)).parameters) == [
            "features",
            "cooperative_reduction",
        ]
        assert f"V.choices.{name}(" in inspect.getsource(TritonKernel)
        otherwise = staticmethod(lambda features, cooperative_reduction: False)
        monkeypatch.setattr(InductorChoices, name, otherwise)
        features = SimpleNamespace(reduction_numel=size, get_reduction_hint=lambda: ReductionHint[hint])
        with internals.whole_reductions(4096):
            assert (
                InductorChoices().should_use_persistent_reduction(features, cooperative_reduction=cooperative) == whole
            )
        assert InductorChoices.__dict__[name] is otherwise

    def test_only_the_first_wait_of_a_kernel_stays(self) -> None:
        from torch._inductor.utils import IndentedBuffer

        kernel_class = internals._waiting_kernel()
        code = IndentedBuffer()
        code.writelines(["a = 1", kernel_class.GDC_WAIT, "b = 2", kernel_class.GDC_WAIT])
        kernel_class._filter_pdl(SimpleNamespace(GDC_WAIT=kernel_class.GDC_WAIT, GDC_LAUNCH="launch"), code)
        assert code.getrawvalue().count(kernel_class.GDC_WAIT) == 1


class TestGGUF:
    def test_the_quick_reader_finds_what_the_original_finds(self, gguf_file: Path) -> None:
        import gguf

        quick, original = internals.gguf_reader_class()(gguf_file), gguf.GGUFReader(gguf_file)
        assert [*quick.fields] == [*original.fields]
        for name, field in original.fields.items():
            assert quick.fields[name].contents() == field.contents()
        for ours, theirs in zip(quick.tensors, original.tensors, strict=True):
            assert (ours.name, ours.tensor_type, ours.data_offset) == (
                theirs.name,
                theirs.tensor_type,
                theirs.data_offset,
            )
            assert np.array_equal(ours.data, theirs.data)

    def test_transformers_reads_with_what_it_is_given(self, gguf_file: Path) -> None:
        import gguf
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        before = gguf.GGUFReader, gguf.get_tensor_name_map
        reader = internals.gguf_reader_class()(gguf_file)
        read: list[Any] = []
        with internals.gguf_looked_up_once(lambda path: (read.append(path), reader)[1]):
            found = load_gguf_checkpoint(gguf_file)
            names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
            assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is names
        assert read == [gguf_file]
        assert found["config"]["model_type"] == "llama"
        assert before == (gguf.GGUFReader, gguf.get_tensor_name_map)


def test_the_command_line_of_lm_eval_parses_and_runs() -> None:
    pytest.importorskip("lm_eval")
    command_line = internals.lm_eval_command_line()
    assert callable(command_line.parse_args)
    assert callable(command_line.execute)


class TestThereIsNoOtherPlace:
    def test_nobody_else_uses_private_names(self) -> None:
        trees = {
            str(file.relative_to(SOURCE)): ast.parse(file.read_text())
            for file in sorted(SOURCE.rglob("*.py"))
            if file.name != "library_internals.py" and file.parent.name != "vllm"
        }
        ours = {"_exit", *(name for tree in trees.values() for name in _defined(tree))}  # os._exit is documented
        used = {file: sorted(set(_private_names(tree)) - ours) for file, tree in trees.items()}
        strangers = {file: names for file, names in used.items() if names}
        assert not strangers, f"private names of other libraries belong in library_internals.py: {strangers}"

    @pytest.mark.parametrize(
        "text",
        [
            "torch._dynamo.disable(f)",
            "import torch._inductor.config",
            "from torch._inductor.config import patch",
            "from torch import _dynamo",
            "getattr(model, '_prefill', None)",
            "config._attn_implementation = 'sdpa'",
        ],
    )
    def test_every_kind_of_use_is_seen(self, text: str) -> None:
        assert _private_names(ast.parse(text))

    def test_what_is_ours_or_python_itself_is_not(self) -> None:
        tree = ast.parse("self.__dict__; from __future__ import annotations; __name__; x = _y + 'a _b'")
        assert not _private_names(tree)


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _private_names(tree: ast.AST) -> list[str]:
    """Private attributes and modules, and strings that name one, as in getattr."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.ImportFrom):
            found += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [part for alias in node.names for part in alias.name.split(".")]
    return [name for name in found if _is_private(name)]


def _defined(tree: ast.AST) -> Iterator[str]:
    """Private names that one of our files defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr  # set on any other object, it belongs to that object


@pytest.mark.skipif(sys.platform != "linux", reason="torch's library has another name elsewhere")
def test_the_threads_of_torch_are_set_for_the_calling_thread_alone() -> None:
    found = internals.openmp_threads()
    assert found is not None
    get, set_threads = found
    before = get()
    assert before == torch.get_num_threads()
    try:
        set_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        set_threads(before)
