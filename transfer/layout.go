package transfer

import "github.com/kvagent/kvagent/cudaipc"

// Segment is where one piece of every block of a group lies: block b's piece is the Bytes bytes at
// Offset + b*Stride of Region.
type Segment struct {
	Region         cudaipc.RegionID
	Offset, Stride uint64
	Bytes          uint32
}

// GroupLayout is one KV cache group of a worker: block b is the concatenation of its segments' pieces.
type GroupLayout struct {
	NumBlocks uint32
	Segments  []Segment
}

// Layout is a worker's KV cache; index is the group's number.
type Layout struct{ Groups []GroupLayout }
