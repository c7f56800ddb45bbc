// Point at a value to read it, pick families in a legend, choose the module whose plan is drawn, change the theme.
const root = document.documentElement;
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

document.getElementById("theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
});

function show(words, event) {
  tip.textContent = words ?? "";
  tip.style.visibility = words ? "visible" : "hidden";
  if (!words) return;
  const { width, height } = tip.getBoundingClientRect();
  const below = event.clientY + 16 + height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${below ? event.clientY + 16 : event.clientY - height - 8}px`;
}

// What stands under the pointer: a point or bar of a plot, a head of a module, a cell of a plan.
function wordsAt(event) {
  const value = event.target.closest?.("[data-tip], [data-value], img.meetings");
  if (!value) return null;
  if (value.dataset.tip) return value.dataset.tip;
  if (value.dataset.value) return `${value.parentNode.dataset.name}\nhead ${value.cellIndex - 1}: error ${value.dataset.value}`;
  return meetingAt(value, event);
}

function meetingAt(image, event) {
  const size = { x: image.naturalWidth, y: image.naturalHeight };
  if (!size.x) return null;
  const box = image.getBoundingClientRect();
  const at = (place, start, length, cells) => Math.min(cells - 1, Math.max(0, Math.floor(((place - start) / length) * cells)));
  const key = at(event.clientX, box.left, box.width, size.x);
  const query = at(event.clientY, box.top, box.height, size.y);
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d");
  context.drawImage(image, key, query, 1, 1, 0, 0, 1, 1);
  const share = Math.round((context.getImageData(0, 0, 1, 1).data[3] / 255) * 20) * 5;
  const part = (cell, cells) => `${Math.round((100 * cell) / cells)}–${Math.round((100 * (cell + 1)) / cells)} %`;
  return `queries at ${part(query, size.y)}, keys at ${part(key, size.x)} of the text\nabout ${share} % of the pairs meet`;
}

for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, (event) => show(wordsAt(event), event));
document.addEventListener("scroll", () => show(null), true);

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    button.ariaPressed = button.ariaPressed === "true" ? "false" : "true";
    const plot = button.closest(".plot");
    const picked = [...plot.querySelectorAll(".legend [aria-pressed=true]")].map((each) => each.dataset.series);
    plot.classList.toggle("picked", picked.length > 0);
    for (const point of plot.querySelectorAll(".point[data-series]")) point.classList.toggle("on", picked.includes(point.dataset.series));
  });
}

document.querySelectorAll("img.meetings").forEach((image, index) => {
  image.parentNode.querySelector("select").addEventListener("change", (event) => {
    image.src = data.meetings[index][event.target.selectedIndex];
  });
});
