"""The main job on a GPU: the first steps of examples/train_lm.py lose what they lose on the CPU.

Of 150 steps as in the demo, and dense: parameters that differ in their last bit move the CPU's own losses by 7e-5 in
five steps and 5e-3 in twenty, with experts (a token near the border of two takes the other) by 3e-4 and 5e-2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
import train_lm


def losses(device, cpu, recipe, steps: int):
    args = train_lm.parse(["--experts", "1"])
    text = train_lm.byte_models.load_text()
    model = train_lm.LanguageModel(args.layers, args.width, args.heads, args.experts, args.top_k, recipe)
    optimizer = train_lm.make_optimizer(args)
    with jax.default_device(cpu):
        variables = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, args.context), jnp.uint8))
        state = train_lm.first_state(variables, optimizer)
    with jax.default_device(device):
        state, step, found = jax.device_put(state, device), train_lm.make_step(model, optimizer, args.seed), []
        for _, batch in zip(range(steps), train_lm.batches(text.train, args), strict=False):
            state, loss = step(state, batch)
            found.append(loss)
        return np.asarray(jnp.stack(found))


RECIPES = {f"nvfp4 {mode}": fp4.NVFP4BlockScaling(mode) for mode in train_lm.MODES}
RECIPES |= {name: made("default") for name, made in train_lm.RECIPES.items() if name != "nvfp4"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_first_steps(gpu, cpu, name):
    got, want = (losses(device, cpu, RECIPES[name], 20) for device in (gpu, cpu))
    print(f"{name}: {np.max(np.abs(got - want)):.1e} of {want[0]:.3f} to {want[-1]:.3f}")
    np.testing.assert_allclose(got[:5], want[:5], rtol=1e-3)
    np.testing.assert_allclose(got, want, rtol=2e-2)
