package cudaipc

// MaxRawCopy bounds what CUDA.Raw copies at once, bytes.
const MaxRawCopy = 4 << 30

// RawCopies are what the copy engines of a GPU do with single copies, bytes per second.
type RawCopies struct {
	ToHost, ToGPU float64
	Both          float64 // both at once, together
}
