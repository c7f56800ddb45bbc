from recipes.common.command import run
from recipes.terrain.run import main

run("terrain", main)
