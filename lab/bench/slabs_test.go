package bench

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/evict"
)

// smallSlabs are flags of a run that takes 32 MiB.
var smallSlabs = []string{
	"bench", "slabs", "--json", "--pool", "32MiB", "--slab", "1MiB",
	"--slots", "16KiB,24KiB", "--conversations", "64", "--store", "2MiB",
}

func runSlabs(t *testing.T, more ...string) slabsReport {
	t.Helper()
	out, code := benchOutput(t, append(smallSlabs, more...)...)
	var r slabsReport
	if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil {
		t.Fatalf("exit %d, %v: %s", code, err, out)
	}
	return r
}

func TestBenchSlabsOutput(t *testing.T) {
	t.Parallel()
	r := runSlabs(t)
	if r.PoolBytes != 32<<20 || r.SlabBytes != 1<<20 || len(r.SlotBytes) != 2 ||
		r.Conversations != 64 || r.Seed != 1 || r.Eviction != evict.DefaultName {
		t.Errorf("%+v", r)
	}
	if len(r.Phases) != 3 || r.Phases[0].Name != "fill" || r.Phases[1].Name != "second" || r.Phases[2].Name != "mixed" {
		t.Fatalf("phases %+v", r.Phases)
	}
	for _, p := range r.Phases {
		if p.StoredBytes <= 0 || p.Reservations <= 0 || p.ReserveMeanUs <= 0 ||
			p.ReserveWorstUs < p.ReserveMeanUs || p.Refused != 0 {
			t.Errorf("%+v", p)
		}
	}
	for _, p := range r.Phases[1:] {
		if most := 2*p.StoredBytes + r.SlabBytes*int64(len(r.SlotBytes)); p.EvictedBytes+p.MovedBytes > most {
			t.Errorf("%s: %d bytes stored, %d evicted and %d moved, may be %d",
				p.Name, p.StoredBytes, p.EvictedBytes, p.MovedBytes, most)
		}
	}
	if r.Checked == 0 || r.Wrong != 0 {
		t.Errorf("%d blocks compared, %d wrong", r.Checked, r.Wrong)
	}
	again := runSlabs(t)
	for i := range r.Phases {
		a, b := r.Phases[i], again.Phases[i]
		if a.StoredBytes != b.StoredBytes || a.EvictedBytes != b.EvictedBytes ||
			a.MovedBytes != b.MovedBytes || a.SlabsGiven != b.SlabsGiven {
			t.Errorf("one seed, two results: %+v and %+v", a, b)
		}
	}
}

func TestBenchSlabsRefuses(t *testing.T) {
	t.Parallel()
	for flag, value := range map[string]string{
		"--slots": "1", "--conversations": "0", "--store": "0", "--eviction": "none", "--pool": "1KiB",
	} {
		out, code := benchOutput(t, append(smallSlabs, flag, value)...)
		if code == 0 || !strings.Contains(out, strings.TrimPrefix(flag, "--")) {
			t.Errorf("%s %s: exit %d: %s", flag, value, code, out)
		}
	}
}
