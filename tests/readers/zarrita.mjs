// Prints, as JSON, the arrays of a store that zarrita.js reads. Runs in a directory with
// node_modules/zarrita: node --input-type=module - STORE PATH... < zarrita.mjs
import { FileSystemStore } from "@zarrita/storage";
import * as zarr from "zarrita";

function nested(chunk, shape, stride, start) {
  if (shape.length === 0) {
    const item = chunk.data.get ? chunk.data.get(start) : chunk.data[start];
    return typeof item === "bigint" ? { int: String(item) } : item;
  }
  const rows = [];
  for (let i = 0; i < shape[0]; i++) {
    rows.push(nested(chunk, shape.slice(1), stride.slice(1), start + i * stride[0]));
  }
  return rows;
}

const found = {};
for (const path of process.argv.slice(3)) {
  try {
    const store = new FileSystemStore(process.argv[2] + "/" + path);
    const array = await zarr.open.v3(store, { kind: "array" });
    const chunk = array.shape.length ? await zarr.get(array) : { data: [await zarr.get(array)] };
    found[path] = nested(chunk, array.shape, chunk.stride ?? [], 0);
  } catch (error) {
    found[path] = String(error);
  }
}
console.log(JSON.stringify(found));
