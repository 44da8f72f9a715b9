package agent

import (
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// A block that one engine saved is found and loaded by another, byte for byte.
func TestSaveLookupLoad(t *testing.T) {
	r := newRig(t)
	reg := register("a")
	reg.LookupName = "look"
	_, a, answer := r.joinEngine(reg)
	other := register("b")
	_, b, _ := r.joinEngine(other)
	hashes := chain(1, 3)
	for i := range 3 {
		a[0].fill(i, byte(i+1))
	}
	if got := a[0].save(answer.Epoch, hashes, 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	if got := ask(t, r.asker("look"), ipc.LookupRequest{Tokens: 1000, HashLen: 32,
		Hashes: hashes}); got.Tokens != 3*testBlockTokens || got.Status != ipc.LookupHit {
		t.Fatalf("look-up: %+v", got)
	}
	if got := b[0].load(answer.Epoch, 0, hashes, 10); !all(got, blockOK) {
		t.Fatalf("load: %v", got)
	}
	for i := range 3 {
		if !b[0].filled(10+i, byte(i+1)) {
			t.Errorf("block %d has other bytes than were saved", i)
		}
	}
	st := r.guests.Status()
	if st.BlocksSaved != 3 || st.BlocksLoaded != 3 || st.BlocksStored != 3 || st.Engines != 2 ||
		st.LookupHits != 1 {
		t.Errorf("status: %+v", st)
	}
}

// Mutant "entry visible with one rank missing": a block is found when all ranks committed theirs,
// not before.
func TestEntryVisibleOnlyWithAllRanks(t *testing.T) {
	r := newRig(t)
	reg := register("tp2")
	reg.World, reg.Shards = 2, 2
	reg.LookupName = "look"
	_, w, answer := r.joinEngine(reg)
	hashes := chain(7, 4)
	look := r.asker("look")
	question := ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: hashes}
	if got := w[0].save(answer.Epoch, hashes, 0); !all(got, blockOK) {
		t.Fatalf("save of rank 0: %v", got)
	}
	if got := ask(t, look, question); got.Tokens != 0 || got.Status != ipc.LookupHit {
		t.Fatalf("entry visible with one rank missing: %+v, want 0 tokens", got)
	}
	if got := w[1].save(answer.Epoch, hashes[:3*32], 0); !all(got, blockOK) {
		t.Fatalf("save of rank 1: %v", got)
	}
	if got := ask(t, look, question); got.Tokens != 3*testBlockTokens {
		t.Fatalf("both ranks saved 3 blocks: %+v, want %d tokens", got, 3*testBlockTokens)
	}
}
