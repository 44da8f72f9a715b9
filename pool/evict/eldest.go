package evict

import "math/bits"

// front is the class that has the entry used least recently. It stays so until its oldest entry is younger than the
// oldest of all others was, for those only get younger.
type front struct {
	kinds uint64 // it is known for; 0 is not known
	kind  int
	class int
	until uint32 // ms
}

// eldest is the entry of the kinds that was used least recently.
func (h *Hazard) eldest(kinds uint64) (k *cells, c int, e uint32) {
	f := &h.lru
	if f.kinds == kinds {
		k = h.kinds[f.kind]
		if first, some := k.oldest(f.class); some && int32(first.used-f.until) <= 0 {
			return k, f.class, first.entry
		}
	}
	return h.findEldest(kinds)
}

// oldest is the entry of a class that was used least recently, if the class has entries.
func (k *cells) oldest(c int) (first eldest, some bool) {
	if k.filled[c] == 0 {
		return eldest{}, false
	}
	return k.first[c][bits.Len64(k.filled[c])-1], true
}

// findEldest looks at all classes.
func (h *Hazard) findEldest(kinds uint64) (k *cells, c int, e uint32) {
	f := front{kinds: kinds}
	var age, second uint32
	for i, o := range h.kinds {
		if o == nil || kinds>>i&1 == 0 {
			continue
		}
		for class := range o.filled {
			first, some := o.oldest(class)
			if !some {
				continue
			}
			a := uint32(h.clock.now) - first.used
			if e == 0 || a > age {
				k, c, e, second, age = o, class, first.entry, age, a
				f.kind, f.class = i, class
			} else {
				second = max(second, a)
			}
		}
	}
	f.until = uint32(h.clock.now) - second
	if h.lru = f; e == 0 {
		h.lru.kinds = 0
	}
	return k, c, e
}
