from recipes.common.command import run
from recipes.embed.run import main

run("embed", main)
