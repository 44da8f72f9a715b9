package evictsim

import (
	"fmt"
	"os"
	"testing"

	"github.com/kvagent/kvagent/pool/evict"
)

func TestQuick(t *testing.T) {
	s, err := ReadTrace("../../../../shared/traces/conversation_trace.jsonl")
	if err != nil {
		t.Skip(err)
	}
	for _, c := range []int{1000, 3000} {
		h := evict.NewHazard()
		a := Run(s, h, c)
		l := Run(s, evict.NewLRU(), c)
		ex := LRU(s, c)
		o := 0.
		if os.Getenv("OPT") != "" {
			o = Optimum(s, c).HitRate()
		}
		r := h.Report()
		fmt.Printf("%6d haz %.4f lru %.4f exact %.4f opt %.4f  ns %d vs %d  alarms %d ghosts %d bytes/e %d\n", c, a.HitRate(), l.HitRate(), ex.HitRate(), o, a.PerAccess(), l.PerAccess(), r.Alarms, r.Ghosts, r.Bytes/int64(r.Entries))
	}
}
