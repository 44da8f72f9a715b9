package ipc

// Frames is a message of several frames, one behind the other in Buf from Start on.
type Frames struct {
	Buf   []byte
	Start int32   // where frame 0 begins
	Ends  []int32 // Ends[i] is where frame i ends
}

// Len is the number of frames.
func (f *Frames) Len() int { return len(f.Ends) }

// At is frame i.
func (f *Frames) At(i int) []byte {
	from := f.begin(i)
	return f.Buf[from:f.Ends[i]:f.Ends[i]]
}

func (f *Frames) begin(i int) int32 {
	if i == 0 {
		return f.Start
	}
	return f.Ends[i-1]
}

// From is the frames from i on, 0 <= i <= Len.
func (f *Frames) From(i int) Frames {
	return Frames{Buf: f.Buf, Start: f.begin(i), Ends: f.Ends[i:]}
}

// Bytes is the sum of the frames' lengths.
func (f *Frames) Bytes() int {
	if len(f.Ends) == 0 {
		return 0
	}
	return int(f.Ends[len(f.Ends)-1] - f.Start)
}

// Reset empties f and keeps its memory.
func (f *Frames) Reset() { f.Buf, f.Start, f.Ends = f.Buf[:0], 0, f.Ends[:0] }

// Add appends a frame.
func (f *Frames) Add(b []byte) {
	f.Buf = append(f.Buf, b...)
	f.end()
}

// end closes the frame whose bytes were appended to Buf.
func (f *Frames) end() { f.Ends = append(f.Ends, int32(len(f.Buf))) }
