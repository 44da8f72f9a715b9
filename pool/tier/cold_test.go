package tier

import (
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// What is about to be evicted is written before, and what is in use is not, while memory has room.
func TestOnEvict(t *testing.T) {
	d, err := dram.Open(dram.Options{Bytes: 256 << 10, SlabBytes: 64 << 10})
	check(t, err)
	defer d.Close()
	store := pooltest.NewShelf()
	p, err := Open(d, []Tier{{Name: "disk", Store: store, Local: true, Write: OnEvict}}, Options{PrefetchBytes: 128 << 10})
	check(t, err)
	defer p.Close()
	n := &node{Pool: p, t: t, spec: specOf("model", 1)}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
	n.save(chain("a", 100))
	n.save(chain("b", 100))
	if store.Len() != 0 {
		t.Errorf("%d blocks are written while memory has room", store.Len())
	}
	n.save(chain("c", 40)) // 240 of 256
	n.stored(0, 240)
	for i := range 10 {
		n.save(chain(fmt.Sprint("new", i), 20))
	}
	count, refs := n.settled(chain("a", 100))
	if count != 100 || n.load(chain("a", 100)) != 100 {
		t.Errorf("%d of 100 blocks came back: %+v", count, n.Report())
	}
	n.Unpin(refs)
	if _, err := Open(newNode(t, 100, 1, Options{}).mem, []Tier{{Name: "disk", Store: store, Write: OnEvict}}, Options{}); err == nil {
		t.Error("a memory that cannot tell its coldest blocks was accepted")
	}
	var _ pool.Chilling = d
}
