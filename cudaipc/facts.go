package cudaipc

// GPUFacts are what is measured of a GPU once: by the mover's first process, before its device is opened.
type GPUFacts struct {
	Table   *CopyTable `json:",omitempty"` // nil: not measured
	Context int64      // bytes of the GPU's memory that an open device takes for itself, without its engines' memory; 0: not known
	Problem string     // why something is missing; empty: nothing is
}

// TableSource is where the copy table in use comes from.
type TableSource string

// The sources.
const (
	TableMeasured TableSource = "measured" // at the start of this agent's first mover of the GPU
	TableKnown    TableSource = "known"    // from those that the device was given
	TableDefault  TableSource = "default"  // nothing was measured on such a GPU
)
