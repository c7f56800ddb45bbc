from recipes.biggan.run import main
from recipes.common.command import run

run("biggan", main)
