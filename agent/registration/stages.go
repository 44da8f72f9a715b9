package registration

import (
	"encoding/binary"
	"fmt"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer"
)

// Stages are what a worker declared for its staged loads.
type Stages struct {
	stages *transfer.Stages
	off    uint64 // of the words, in the sync region
	count  uint32
}

// wordBytes is the size of the word that counts the stages of a load.
const wordBytes = 8

// MakeStages checks what a worker declares against the layouts of its shards. An error comes with
// the name of the field.
func MakeStages(m *ipc.Stages, layouts []transfer.Held) (s *Stages, field string, err error) {
	if m.Off%wordBytes != 0 {
		return nil, "off", fmt.Errorf("%d, allowed is a multiple of %d", m.Off, wordBytes)
	}
	list := make([]uint16, len(m.List)/2)
	for i := range list {
		list[i] = binary.LittleEndian.Uint16(m.List[2*i:])
	}
	made, err := transfer.MakeStages(layouts, list)
	return &Stages{made, m.Off, m.Count}, "stages", err
}

// Load returns how a load that counts in a word is staged, or nil if there is no such word. Without
// stages there is none.
func (s *Stages) Load(word uint32) *transfer.Staged {
	if s == nil || word >= s.count {
		return nil
	}
	return &transfer.Staged{Stages: s.stages, Word: s.off + wordBytes*uint64(word)}
}
