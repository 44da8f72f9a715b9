package engine

import (
	"fmt"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
)

// engineWords are the words of an engine, in shared memory of their own: the step word, a cell
// for each event, and the revocation words.
type engineWords struct {
	words           *HostMemory
	events, revokes uint32
	revokeOff       uint64
	extraOff        uint64 // where the extra bytes begin
}

// wordsAlign is the alignment of the extra bytes after the words.
const wordsAlign = 128

// MaxStageWords is how many words for loads by stages an engine on the host has.
const MaxStageWords = wordsAlign / 8

// newEngineWords makes words with event cells of cell bytes, and more extra bytes after them.
func newEngineWords(events uint32, cell uint64, revokes uint32, more uint64) (w engineWords, err error) {
	end := uint64(eventsFrom) + uint64(events)*cell
	w.events, w.revokes = events, revokes
	w.revokeOff = (end + revokeAlign - 1) &^ (revokeAlign - 1)
	w.extraOff = (w.revokeOff + uint64(revokes)*4 + wordsAlign - 1) &^ (wordsAlign - 1)
	w.words, err = newHostMemory(SyncRegion, int64(w.extraOff+max(more, wordsAlign)))
	return w, err
}

// SyncDesc describes the words for an import: their region, whose descriptor stays the engine's,
// and their places.
func (w *engineWords) SyncDesc() (cudaipc.Region, cudaipc.Sync) {
	return w.words.Region(), cudaipc.Sync{
		Region: SyncRegion, StepOff: 0,
		EventsOff: eventsFrom, Events: w.events,
		RevokeOff: w.revokeOff, Revokes: w.revokes,
	}
}

// Step returns the step word: the last step that a stream has passed.
func (w *engineWords) Step() uint64 { return atomic.LoadUint64(cudaipc.Word64(w.words.Mem, 0)) }

// StageWords returns the offset of MaxStageWords words of 8 bytes for loads by stages, in the
// region of the words. Only engines on the host have them.
func (w *engineWords) StageWords() uint64 { return w.extraOff }

// StageWord returns one of the words for loads by stages. The engine sets it to 0 before a load
// that names it.
func (w *engineWords) StageWord(i uint32) *uint64 {
	if i >= MaxStageWords {
		panic(fmt.Sprintf("word of a load by stages %d of %d", i, MaxStageWords))
	}
	return cudaipc.Word64(w.words.Mem, w.extraOff+uint64(i)*8)
}

// Revoke sets revocation word i: a save that names it is not committed from now on.
func (w *engineWords) Revoke(i uint32) { atomic.StoreUint32(w.revokeWord(i), 1) }

// ClearRevoke makes word i usable for another save.
func (w *engineWords) ClearRevoke(i uint32) { atomic.StoreUint32(w.revokeWord(i), 0) }

func (w *engineWords) revokeWord(i uint32) *uint32 {
	if i >= w.revokes {
		panic(fmt.Sprintf("revocation word %d of %d", i, w.revokes))
	}
	return cudaipc.Word32(w.words.Mem, w.revokeOff+uint64(i)*4)
}
