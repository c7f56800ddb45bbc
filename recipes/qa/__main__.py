from recipes.common.command import run
from recipes.qa.run import main

run("qa", main)
