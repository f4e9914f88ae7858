"use strict";
// A click on a title sorts its column: numbers from the largest, texts from A; the next click turns it around.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("number");
      const down = head.ariaSort ? head.ariaSort === "ascending" : numbers;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.ariaSort = down ? "descending" : "ascending";
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        if ((left === "") !== (right === "")) return left === "" ? 1 : -1;  // what was not measured comes last
        const order = numbers ? left - right : left.localeCompare(right, "en", { numeric: true });
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
