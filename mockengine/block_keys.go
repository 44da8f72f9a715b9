package mockengine

// Keys of a request's blocks, and the words of its tokens.

// trueHash returns the hash of hash block i over the actual tokens, whether the scheduler knows
// them or not.
func (e *Engine) trueHash(r *request, i int) *Hash {
	n := e.cfg.BlockTokens
	for len(r.trueHashes) <= i {
		k := len(r.trueHashes)
		h := e.hasher.next(e.parent(r, k), r.truth[k*n:(k+1)*n])
		r.trueHashes = append(r.trueHashes, h)
	}
	return &r.trueHashes[i]
}

var noHash Hash

// parent returns the hash of the block before hash block i.
func (e *Engine) parent(r *request, i int) *Hash {
	if i == 0 {
		return &noHash
	}
	return e.trueHash(r, i-1)
}

// hash returns the hash of hash block i as the scheduler computes it: an unknown token counts as a
// placeholder.
func (e *Engine) hash(r *request, i int) Hash {
	n := e.cfg.BlockTokens
	if (i+1)*n <= r.nt {
		return *e.trueHash(r, i)
	}
	parent := noHash
	if i > 0 {
		parent = e.hash(r, i-1)
	}
	tokens := make([]uint32, n)
	for j := range tokens {
		if tokens[j] = placeholder; i*n+j < r.nt {
			tokens[j] = r.truth[i*n+j]
		}
	}
	return e.hasher.next(&parent, tokens)
}

// key returns the key of block b of a group: the hash at its end.
func (e *Engine) key(r *request, g, b int) cacheKey {
	scale := e.cfg.Groups[g]
	return cacheKey{group: uint8(g), hash: e.hash(r, (b+1)*scale-1)}
}

// hashes returns the keys of the whole known prompt.
func (e *Engine) hashes(r *request) []Hash {
	if n := r.nt / e.cfg.BlockTokens; n > 0 {
		e.trueHash(r, n-1)
		return r.trueHashes[:n]
	}
	return nil
}

// blockTokens returns the number of tokens of a group's block.
func (e *Engine) blockTokens(g int) int { return e.cfg.Groups[g] * e.cfg.BlockTokens }

// write adds to a step the words that tokens at positions from on complete, in all groups. Only
// actual tokens advance the tails.
func (e *Engine) write(k *work, r *request, from int, tokens []uint32, isTrue bool) {
	for g := range e.cfg.Groups {
		size, shape := e.blockTokens(g), &e.workers.shapes[g]
		for i := from; i < from+len(tokens); {
			b, off := i/size, i%size
			end := min((b+1)*size, from+len(tokens))
			state := e.chainAt(r, g, i)
			at := len(k.bases)
			k.bases, state = shape.appendBase(k.bases, state, off, tokens[i-from:end-from])
			if at < len(k.bases) {
				k.pieces = append(k.pieces, piece{group: uint8(g), block: r.tables[g][b], at: shape.complete(off),
					from: at, to: len(k.bases)})
			}
			if isTrue {
				r.tails[g] = tail{pos: end, state: state}
			}
			i = end
		}
	}
}

// chainAt returns the state before position i in the block of a group that holds it.
func (e *Engine) chainAt(r *request, g, i int) chain {
	size := e.blockTokens(g)
	b := i / size
	if i%size != 0 && r.tails[g].pos == i {
		return r.tails[g].state
	}
	c := startChain(e.parent(r, b*e.cfg.Groups[g]))
	for _, t := range r.truth[b*size : i] {
		c = c.next(t)
	}
	return c
}

// check compares the blocks that hold tokens from to to-1 of a request with the expected content.
// Blocks must be whole at from; words that a token before to does not complete are not compared.
func (e *Engine) check(r *request, g, from, to int) {
	size, shape := e.blockTokens(g), &e.workers.shapes[g]
	for b := from / size; b*size < to; b++ {
		end := min((b+1)*size, to)
		e.scratch, _ = shape.appendBase(e.scratch[:0], startChain(e.parent(r, b*e.cfg.Groups[g])), 0,
			r.truth[b*size:end])
		e.stats.BlocksVerified++
		if n := e.workers.wrong(uint8(g), r.tables[g][b], e.scratch); n > 0 {
			e.stats.WrongBytes += uint64(n)
			e.onWrong(r, g, b, n)
		}
	}
}
