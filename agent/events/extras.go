package events

// extras keeps what else engines' events have besides tokens (salts, adapters), each once: few
// blocks have any, and those of one prompt have the same. Number 0 is none.
type extras struct {
	numbers map[string]uint32
	texts   map[uint32]*extraText
	last    uint32
}

type extraText struct {
	text   []byte
	blocks int // that have it
}

func (x *extras) take(text []byte) uint32 {
	if len(text) == 0 {
		return 0
	}
	n, known := x.numbers[string(text)]
	if !known {
		if x.numbers == nil {
			x.numbers, x.texts = map[string]uint32{}, map[uint32]*extraText{}
		}
		for n = x.last + 1; n == 0 || x.texts[n] != nil; {
			n++
		}
		x.last = n
		x.numbers[string(text)], x.texts[n] = n, &extraText{text: append([]byte(nil), text...)}
	}
	x.texts[n].blocks++
	return n
}

func (x *extras) drop(n uint32) {
	if n == 0 {
		return
	}
	one := x.texts[n]
	if one.blocks--; one.blocks == 0 {
		delete(x.texts, n)
		delete(x.numbers, string(one.text))
	}
}

// get returns the text of a number. It stays the extras'.
func (x *extras) get(n uint32) []byte {
	if n == 0 {
		return nil
	}
	return x.texts[n].text
}
