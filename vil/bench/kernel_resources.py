"""Read the resources of compiled GPU kernels: registers, spills, memory and instruction counts.

The functions parse text: the output of `cuobjdump` for a CUDA binary, the assembly of an AMD
kernel, and Triton's GPU IR. They need neither Triton nor a GPU.
"""

import re
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Limits:
    """Hardware limits of one multiprocessor: an SM of an NVIDIA GPU, or a CU of an AMD GPU."""

    registers: int  # 32-bit registers of one partition, divided by the threads of a warp
    granularity: int  # each thread gets registers in multiples of this number
    warps: int  # maximum number of resident warps
    blocks: int  # maximum number of resident thread blocks
    shared: int  # bytes of shared memory
    reserved: int  # bytes of shared memory that the hardware reserves for each block
    partitions: int = 4  # each with its own registers and scheduler


# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and AMD
# Instinct MI300 ISA, sections 3.6 and 12.
# 65,536 registers per SM, so 16,384 per partition, for 32 lanes
LIMITS = {
    "sm_80": Limits(512, 8, 64, 32, 164 * KIB, KIB),
    "sm_86": Limits(512, 8, 48, 16, 100 * KIB, KIB),
    "sm_89": Limits(512, 8, 48, 24, 100 * KIB, KIB),
    "sm_90": Limits(512, 8, 64, 32, 228 * KIB, KIB),
    "sm_100": Limits(512, 8, 64, 32, 228 * KIB, KIB),
    "sm_120": Limits(512, 8, 48, 32, 100 * KIB, KIB),
    "gfx942": Limits(512, 8, 32, 32, 64 * KIB, 0),  # vector and accumulation registers together
}


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel."""

    registers: int  # per thread
    spilled: int  # bytes of registers spilled to local memory, per thread
    shared: int  # bytes of shared memory, per thread block
    tensor: int  # tensor core instructions
    async_copy: int  # instructions that copy from global to shared memory asynchronously
    local: int  # loads and stores of local memory
    loop_local: int  # loads and stores of local memory inside loops
    matmuls: int  # tl.dot operations in the IR, after inlining and pipelining
    scalar_matmuls: int  # tl.dot operations that do not run on tensor cores


@dataclass(frozen=True)
class Syntax:
    """Regular expressions to parse one assembly language."""

    # an instruction, with the groups (address or None, condition or None, opcode, operands)
    line: re.Pattern
    # a line that names the next instruction in group 1; None if branch targets are addresses
    label: re.Pattern | None
    target: re.Pattern  # the target in the operands of a branch
    branch: re.Pattern  # opcode of a branch
    conditional: re.Pattern  # operands of a conditional branch
    end: re.Pattern  # opcode that ends the kernel
    tensor: re.Pattern  # opcode of a tensor core instruction
    async_copy: re.Pattern  # opcode of an asynchronous copy from global to shared memory
    local: re.Pattern  # opcode of a load or store of local memory


SASS = Syntax(
    line=re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);"),
    label=None,
    target=re.compile(r"\b0x([0-9a-f]+)\s*$"),
    branch=re.compile(r"BRA|JMP"),
    conditional=re.compile(r"\bU?P\d"),
    end=re.compile(r"EXIT|RET|KILL"),
    tensor=re.compile(r"[HBIQOD]G?MMA|UTC\w*MMA"),
    async_copy=re.compile(r"LDGSTS|UTMALDG|UBLKCP"),
    local=re.compile(r"(LDL|STL)\b"),
)
AMDGCN = Syntax(
    line=re.compile(r"\t()()([a-z]\w+)[ \t]*([^;]*)"),
    label=re.compile(r"(\.LBB\w+):"),
    target=re.compile(r"(\.LBB\w+)\s*$"),
    branch=re.compile(r"s_c?branch"),
    conditional=re.compile(r"(?!)"),  # the opcode says it
    end=re.compile(r"s_endpgm|s_setpc"),
    tensor=re.compile(r"v_s?mfma"),
    async_copy=re.compile(r"global_load_lds|buffer_load\w*_lds"),
    local=re.compile(r"scratch_(load|store)"),
)


def count_instructions(text: str, syntax: Syntax) -> dict[str, int]:
    """Count the instructions of each type in a disassembly. Returns {field of `Resources`: number}.

    Raises ValueError if the text has no instructions, or if a branch has an unknown target.
    """
    lines, labels = [], {}
    for raw in text.splitlines():
        if syntax.label and (match := syntax.label.match(raw)):
            labels[match[1]] = len(lines)
        elif match := syntax.line.match(raw):
            if match[1]:
                labels[match[1].lstrip("0") or "0"] = len(lines)
            lines.append(match.groups())
    if not lines:
        raise ValueError("the disassembly has no instructions")
    opcodes = [opcode for _, _, opcode, _ in lines]
    local = [at for at, opcode in enumerate(opcodes) if syntax.local.match(opcode)]
    looped = _lines_in_loops(_successors(lines, labels, syntax)) if local else set()
    return dict(
        tensor=sum(bool(syntax.tensor.match(opcode)) for opcode in opcodes),
        async_copy=sum(bool(syntax.async_copy.match(opcode)) for opcode in opcodes),
        local=len(local),
        loop_local=sum(at in looped for at in local),
    )


def _successors(lines: list[tuple], labels: dict[str, int], syntax: Syntax) -> list[list[int]]:
    """Return a list with one item per instruction: the indices of the instructions that can run
    next. lines: for each instruction, the groups that `syntax.line` matched. labels: {label: index
    of the instruction that it marks}."""
    found = []
    for at, (_, condition, opcode, operands) in enumerate(lines):
        following = [at + 1] if at + 1 < len(lines) else []
        if syntax.branch.match(opcode):
            match = syntax.target.search(operands.strip())
            name = match and (match[1] if syntax.label else match[1].lstrip("0") or "0")
            if name not in labels:
                raise ValueError(f"the branch {opcode} {operands.strip()} has no known target")
            conditional = condition or syntax.conditional.search(operands) or "cbranch" in opcode
            following = [labels[name], *(following if conditional else [])]
        elif syntax.end.match(opcode) and not condition:
            following = []
        found.append(following)
    return found


def _lines_in_loops(successors: list[list[int]]) -> set[int]:
    """Return the indices of the instructions inside loops. successors: for each instruction, the
    indices of the instructions that can run next."""
    targets = {to for at, following in enumerate(successors) for to in following if to != at + 1}
    targets |= {at + 1 for at, following in enumerate(successors) if following != [at + 1]}
    starts = sorted((targets | {0}) & set(range(len(successors))))
    blocks = dict(zip(starts, [*starts[1:], len(successors)]))  # first line: line after the last
    looped: set[int] = set()
    for start, end in blocks.items():
        seen, pending = set(), list(successors[end - 1])
        while pending:
            if (block := pending.pop()) not in seen:
                seen.add(block)
                pending += successors[blocks[block] - 1]
        if start in seen:
            looped |= set(range(start, end))
    return looped


def parse_usage(text: str) -> tuple[int, int]:
    """Parse the output of `cuobjdump --dump-resource-usage` for one kernel.

    Returns (registers, bytes of local memory) per thread. Local memory includes the stack frame,
    where spilled registers are stored. Raises ValueError if the text does not describe exactly one
    kernel.
    """
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if len(found) != 1:
        raise ValueError(f"expected one kernel in the resource usage, got {len(found)}")
    registers, stack, local = map(int, found[0])
    return registers, stack + local


def parse_amd_usage(text: str) -> tuple[int, int]:
    """Parse the metadata in the AMD assembly of one kernel.

    Returns (registers, bytes of private memory) per lane. Accumulation registers are included.
    Raises ValueError if the text has no such metadata.
    """
    fields = dict(re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE))
    if missing := {"vgpr_count", "private_segment_fixed_size"} - set(fields):
        raise ValueError(f"the metadata in the AMD assembly lacks {', '.join(sorted(missing))}")
    return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])


def count_matmuls(ir: str) -> tuple[int, int]:
    """Count the matmuls in Triton's GPU IR ("ttgir").

    Returns (number of matmuls, number of matmuls that do not run on tensor cores). A tl.dot
    whose result has a blocked layout does not run on tensor cores. It runs as scalar multiply-add
    instructions.
    """
    units = len(re.findall(r"\bttng\.(?:warp_group_dot|tc_gen5_mma)\b", ir))
    dots = re.findall(r"= tt\.dot(?:_scaled)? .*-> tensor<[^#>]*#(\w+)>", ir)
    if len(dots) != len(re.findall(r"= tt\.dot(?:_scaled)? ", ir)):
        raise ValueError("cannot count the matmuls: the IR has a tt.dot without a layout")
    return units + len(dots), sum(not layout.startswith("mma") for layout in dots)


def blocks_per_sm(target: str, registers: int, shared: int, warps: int) -> int:
    """Return how many thread blocks of a kernel one multiprocessor can hold; 0 if none fits.

    target: a key of LIMITS, such as "sm_90". registers: number per thread. shared: bytes per thread
    block. warps: number per thread block. Raises ValueError for an unknown target.
    """
    if target not in LIMITS:
        raise ValueError(f"target must be one of {', '.join(LIMITS)}, got {target!r}")
    limits = LIMITS[target]
    rounded = -(-max(registers, 1) // limits.granularity) * limits.granularity
    by_registers = limits.partitions * (limits.registers // rounded)  # in warps
    by_warps = min(limits.warps, by_registers) // warps
    by_shared = (
        limits.shared // (shared + limits.reserved) if shared + limits.reserved else by_warps
    )
    return min(by_warps, by_shared, limits.blocks)
