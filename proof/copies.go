package proof

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// fragments are the measured lengths of runs, bytes, with their aims: a share of one raw copy, or
// a rate.
var fragments = []struct {
	name  string
	bytes int64
	share float64 // of raw; 0: no target
	rate  float64 // bytes per second; 0: no target
}{
	{"4KiB", 4 << 10, 0, 23 << 30}, {"16KiB", 16 << 10, 0, 0}, {"32KiB", 32 << 10, 0, 0}, {"64KiB", 64 << 10, 0.90, 0},
	{"256KiB", 256 << 10, 0.95, 0}, {"2MiB", 2 << 20, 0.95, 0},
}

const gib = 1 << 30

// checkCopies measures the device on lists of fragments, as transfer submits them, against single
// pinned copies.
func checkCopies(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	raw, err := b.device.Raw(b.sizes.raw, b.sizes.rounds)
	if err != nil {
		return err
	}
	f := b.line.Figures
	f["raw_d2h_gib_s"], f["raw_h2d_gib_s"], f["raw_both_gib_s"] = raw.ToHost/gib, raw.ToGPU/gib, raw.Both/gib
	b.line.say("raw D2H %.1f, H2D %.1f, both %.1f GiB/s", raw.ToHost/gib, raw.ToGPU/gib, raw.Both/gib)
	e, err := b.engine(false, 2*b.sizes.region)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, true)
	if err != nil {
		return err
	}
	for i := range fragments {
		if err := b.measure(peer, i, &raw); err != nil {
			return fmt.Errorf("%s: %w", fragments[i].name, err)
		}
	}
	for _, which := range []int{4, 5} {
		if err := b.checksum(peer, which); err != nil {
			return err
		}
	}
	return b.device.Close(peer)
}

// measure measures fragments of one length, each way and both at once.
func (b *bench) measure(peer cudaipc.PeerID, which int, raw *cuda.RawCopies) error {
	fragment := &fragments[which]
	out, in := b.scattered(peer, cudaipc.Gather, fragment.bytes), b.scattered(peer, cudaipc.Scatter, fragment.bytes)
	for _, m := range []struct {
		way    string
		copies []*cudaipc.Copy
		raw    float64
	}{
		{"d2h", []*cudaipc.Copy{out}, raw.ToHost}, {"h2d", []*cudaipc.Copy{in}, raw.ToGPU},
		{"both", []*cudaipc.Copy{out, in}, raw.Both},
	} {
		rate, err := b.rate(m.copies)
		if err != nil {
			return err
		}
		name := fragment.name + "_" + m.way
		b.line.Figures[name+"_gib_s"], b.line.Figures[name+"_of_raw"] = rate/gib, rate/m.raw
		if fragment.share > 0 && m.way != "both" {
			b.line.aim(name+" of raw", rate/m.raw, fragment.share, false)
		}
		if fragment.rate > 0 && m.way != "both" {
			b.line.aim(name+" GiB/s", rate/gib, fragment.rate/gib, false)
		}
	}
	f := b.line.Figures
	b.line.say("%s D2H %.1f (%.0f %%), H2D %.1f (%.0f %%)", fragment.name, f[fragment.name+"_d2h_gib_s"],
		100*f[fragment.name+"_d2h_of_raw"],
		f[fragment.name+"_h2d_gib_s"], 100*f[fragment.name+"_h2d_of_raw"])
	return nil
}

// scattered returns a copy of the whole arena from or to every second fragment of the region, as
// blocks lie layer by layer.
func (b *bench) scattered(peer cudaipc.PeerID, dir cudaipc.Direction, fragment int64) *cudaipc.Copy {
	c := &cudaipc.Copy{Peer: peer, Dir: dir}
	for at := int64(0); at+fragment <= b.sizes.region; at += fragment {
		c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: uint64(2 * at), ArenaOff: at, Len: uint32(fragment)})
	}
	c.Blocks = []cudaipc.Block{{Runs: uint32(len(c.Runs))}}
	return c
}

// rate returns the rate of concurrent copies, bytes per second: the median of the rounds.
func (b *bench) rate(copies []*cudaipc.Copy) (float64, error) {
	var took []time.Duration
	for range b.sizes.rounds {
		begin := time.Now()
		var tickets []cudaipc.Ticket
		for _, c := range copies {
			t, err := b.device.Copy(c)
			if err != nil {
				return 0, err
			}
			tickets = append(tickets, t)
		}
		for _, t := range tickets {
			if err := b.done(t); err != nil {
				return 0, err
			}
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return float64(len(copies)) * float64(b.sizes.region) / took[len(took)/2].Seconds(), nil
}

// checksumShare is the least share of the rate that --integrity full must keep.
const checksumShare = 0.95

// checksum measures the cost of --integrity full at one length, each way and both at once.
func (b *bench) checksum(peer cudaipc.PeerID, which int) error {
	fragment := &fragments[which]
	var plain, summed [2]*cudaipc.Copy
	for dir := range plain {
		plain[dir] = b.scattered(peer, cudaipc.Direction(dir), fragment.bytes)
		plain[dir].Blocks = nil
		for range plain[dir].Runs {
			plain[dir].Blocks = append(plain[dir].Blocks, cudaipc.Block{Runs: 1})
		}
		with := *plain[dir]
		with.Sum = true
		summed[dir] = &with
	}
	for _, m := range []struct {
		way      string
		from, to int
	}{{"d2h", 0, 1}, {"h2d", 1, 2}, {"both", 0, 2}} {
		without, err := b.rate(plain[m.from:m.to])
		if err != nil {
			return err
		}
		with, err := b.rate(summed[m.from:m.to])
		if err != nil {
			return err
		}
		name := "checksum_" + fragment.name + "_" + m.way
		b.line.Figures[name+"_gib_s"], b.line.Figures[name+"_of_plain"] = with/gib, with/without
		b.line.say("with checksums %s %s %.0f %% of that without", fragment.name, m.way, 100*with/without)
		b.line.aim(name+" of plain", with/without, checksumShare, false)
	}
	return nil
}

// pathShare is the least share of the fastest path's rate that the device's own paths must have.
const pathShare = 0.9

// checkPaths measures each copy path at each length, and holds those that the device uses against
// the fastest.
func checkPaths(b *bench) error {
	e, err := b.engine(false, 2*b.sizes.region)
	if err != nil {
		return err
	}
	rates := map[cuda.CopyPath]map[string]float64{}
	for _, path := range []cuda.CopyPath{cuda.CopySingle, cuda.CopyBatch, cuda.CopyRect} {
		if rates[path], err = b.path(e, path); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	for _, run := range slices.Sorted(maps.Keys(rates[cuda.CopySingle])) {
		flat := max(rates[cuda.CopySingle][run], rates[cuda.CopyBatch][run])
		b.line.aim(run+" of the fastest path", rates[cuda.FlatPath][run]/flat, pathShare, false)
		b.line.aim(run+" in rows of the fastest path", rates[cuda.RowsPath][run]/max(flat, rates[cuda.CopyRect][run]),
			pathShare, false)
	}
	return nil
}

// path measures the rates of one path, bytes per second, by length and way. A driver without the
// batch call has the path of single copies in its place.
func (b *bench) path(e *child, path cuda.CopyPath) (map[string]float64, error) {
	if err := b.openWith(b.sizes.region, path); err != nil {
		return nil, err
	}
	peer, err := b.admit(e, true)
	if err != nil {
		return nil, err
	}
	text, rates := "", map[string]float64{}
	for _, fragment := range fragments {
		for dir, way := range []string{"d2h", "h2d"} {
			rate, err := b.rate([]*cudaipc.Copy{b.scattered(peer, cudaipc.Direction(dir), fragment.bytes)})
			if err != nil {
				return nil, fmt.Errorf("%s %s: %w", fragment.name, way, err)
			}
			rates[fragment.name+"_"+way] = rate
			b.line.Figures[fmt.Sprintf("%s_%s_%s_gib_s", path, fragment.name, way)] = rate / gib
			text += fmt.Sprintf(" %.1f", rate/gib)
		}
	}
	b.line.say("%s%s GiB/s", path, text)
	return rates, b.device.Close(peer)
}
