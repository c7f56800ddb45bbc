from recipes.common.command import run
from recipes.imdb.run import main

run("imdb", main)
