//go:build cuda

package cuda

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// issue is the calls of one chunk, sorted by their path.
type issue struct {
	each, batch driver.List
	rects       []driver.Rect
}

func (is *issue) reset() {
	is.each.Reset()
	is.batch.Reset()
	is.rects = is.rects[:0]
}

// add puts a rectangle, or a single copy, on its path.
func (l *lane) add(r *rect) {
	host := driver.HostAddr(l.d.arena) + r.off
	if r.rows > 1 && l.rowsPath == CopyRect {
		c := driver.Rect{Dst: host, Src: r.dev, Width: r.n, Rows: r.rows, DstPitch: r.offPitch, SrcPitch: r.devPitch}
		if l.dir == cudaipc.Scatter {
			c.Dst, c.Src, c.DstPitch, c.SrcPitch = r.dev, host, r.devPitch, r.offPitch
		}
		l.issue.rects = append(l.issue.rects, c)
		return
	}
	list := &l.issue.each
	if l.flatPath == CopyBatch && driver.HasBatch() {
		list = &l.issue.batch
	}
	for i := range r.rows {
		l.addRow(list, r.dev+i*r.devPitch, host+i*r.offPitch, r.n)
	}
}

func (l *lane) addRow(list *driver.List, dev, host, n uint64) {
	if l.dir == cudaipc.Scatter {
		list.Add(dev, host, n)
	} else {
		list.Add(host, dev, n)
	}
}

// send starts what was added. A batch of one is a single copy.
func (l *lane) send() error {
	is := &l.issue
	toHost := l.dir == cudaipc.Gather
	if len(is.batch.Len) == 1 {
		is.each.Add(is.batch.Dst[0], is.batch.Src[0], is.batch.Len[0])
		is.batch.Reset()
	}
	if len(is.rects) > 0 {
		l.counts.rects.Add(uint64(len(is.rects)))
		if err := l.stream.Rects(is.rects, toHost); err != nil {
			return err
		}
	}
	if len(is.batch.Len) > 0 {
		l.counts.batches.Add(1)
		if err := l.stream.Batch(&is.batch); err != nil {
			return err
		}
	}
	l.counts.singles.Add(uint64(len(is.each.Len)))
	return l.stream.Each(&is.each, toHost)
}
