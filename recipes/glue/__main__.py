from recipes.common.command import run
from recipes.glue.run import main

run("glue", main)
