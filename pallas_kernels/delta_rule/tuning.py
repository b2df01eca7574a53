"""Launch settings of the delta rule's kernels, checked against what a program may ask of the hardware."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64  # rows per chunk, and rows of a wgmma
VALUE_TILE = 64  # value columns of one state warpgroup
MULTIPROCESSORS = 132  # of an H100 or H200, for kernels that share out their work themselves
GRADIENT_REGISTERS = (232, 40)  # per thread, of those that compute the local gradients, and that copy for them
SOLVE_GROUPS = 3  # chunks that one multiprocessor solves at a time


@dataclass(frozen=True)
class Config:
    """How one program of the forward kernel is laid out.

    tiles: state warpgroups per program, 64 value columns each; the rest of V goes to further programs.
    stages: buffers of q, k and v: three, for chunks n, n - 1 (whose state may still be read) and n + 1 (arriving), or
        two, where keys are too large for three: what arrives then waits for what is read.
    state_registers, score_registers: per thread, multiples of 8; None leaves both at what the launch gives.
    """

    tiles: int
    stages: int = 3
    state_registers: int | None = None
    score_registers: int | None = None

    def __post_init__(self) -> None:
        if self.tiles not in (1, 2):
            raise ValueError(f"tiles: {self.tiles} given, wanted 1 or 2.")
        if self.stages not in (2, 3):
            raise ValueError(f"stages: {self.stages} given, wanted 2 or 3.")
        registers = (self.state_registers, self.score_registers)
        if (registers[0] is None) != (registers[1] is None):
            raise ValueError(f"state_registers, score_registers: {registers} given, wanted both or neither.")
        if registers[0] is not None and registers[1] is not None:
            if any(r % 8 or not 24 <= r <= 240 for r in (registers[0], registers[1])):
                raise ValueError(f"registers {registers} given, wanted multiples of 8 from 24 to 240.")
            launch = 65536 // (128 * (self.tiles + 1)) // 8 * 8
            if self.tiles * registers[0] + registers[1] > (self.tiles + 1) * min(launch, 240):
                raise ValueError(f"registers {registers} given, wanted a sum that {self.tiles + 1} warpgroups have.")


# By value tiles of a program; chosen by what the compiler said of spilled registers and serialised products, not by a
# search over times. With states to save, a state warpgroup needs more registers.
_WALK = {1: Config(tiles=1), 2: Config(tiles=2, state_registers=192, score_registers=120)}
_SAVING = {1: Config(tiles=1), 2: Config(tiles=2, state_registers=208, score_registers=88)}


def walk_config(key_size: int, value_size: int, rows: int, *, saving: bool = False) -> Config:
    """The settings for such K and V and `rows` rows times heads; saving: for the forward walk that saves states.

    Two state warpgroups in a program, so that they share its scores; one, where programs for each value tile find room
    at once, where the tiles are odd in number, or where K is beyond 128, of which one alone fills the registers.
    """
    tiles = value_size // VALUE_TILE
    if key_size > 128:
        return Config(tiles=1, stages=2)
    return (_SAVING if saving else _WALK)[1 if tiles * rows <= MULTIPROCESSORS or tiles % 2 else 2]


def pieces(rows: int, chunks: int, key_size: int = 128) -> int:
    """Into how many pieces rows of `chunks` chunks are cut, so that `rows` rows times heads fill the card.

    Pieces cost up to two more walks without outputs. By an estimate of their times, fewer than 4 do not win that back.
    `pieces.chain` holds transitions of up to 128 x 128.
    """
    count = 1
    if key_size > 128:
        return count
    while rows * count * 2 <= MULTIPROCESSORS and chunks >= 16 * count:
        count *= 2
    return count if count >= 4 else 1
