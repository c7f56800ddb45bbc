from recipes.common.command import run
from recipes.hyperpartisan.run import main

run("hyperpartisan", main)
