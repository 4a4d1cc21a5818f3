for (const decisions of document.querySelectorAll(".decisions")) {
  const table = decisions.querySelector("table");
  const tools = decisions.querySelector(".tools");
  const search = tools.querySelector("input[type=search]");
  const kinds = [...tools.querySelectorAll("input[type=checkbox]")];
  const count = tools.querySelector("output");
  const rows = [...table.tBodies[0].rows].map((row) => ({
    row,
    kind: row.dataset.kind,
    text: row.textContent.toLowerCase(),
  }));
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const checked = new Set(kinds.filter((box) => box.checked).map((box) => box.value));
    let shown = 0;
    for (const { row, kind, text } of rows) {
      row.hidden = !(checked.has(kind) && words.every((word) => text.includes(word)));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  for (const box of kinds) box.addEventListener("change", filter);
  search.addEventListener("input", filter);
  tools.hidden = false;
  filter();
}
