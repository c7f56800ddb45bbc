from recipes.approximate.run import main
from recipes.common.command import run

run("approximate", main)
