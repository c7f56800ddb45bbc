from recipes.common.command import run
from recipes.copy.run import main

run("copy", main)
