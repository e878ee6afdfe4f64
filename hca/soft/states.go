package soft

import "github.com/uverbsd/uverbsd/hca"

// transition is one row of the state table for one transport: what must be
// given and what may be.
type transition struct{ req, opt hca.QPAttrMask }

// move is one cell of the table: a transition by transport.
type move struct{ rc, uc, ud, ini, tgt transition }

const (
	mCur    = hca.QPMaskCurState
	mNotify = hca.QPMaskEnSQDAsyncNotify
	mAccess = hca.QPMaskAccess
	mPKey   = hca.QPMaskPKeyIndex
	mPort   = hca.QPMaskPort
	mQKey   = hca.QPMaskQKey
	mAV     = hca.QPMaskAV
	mMTU    = hca.QPMaskPathMTU
	mTmo    = hca.QPMaskTimeout
	mRetry  = hca.QPMaskRetryCnt
	mRNR    = hca.QPMaskRNRRetry
	mRQPSN  = hca.QPMaskRQPSN
	mRd     = hca.QPMaskMaxRdAtomic
	mAlt    = hca.QPMaskAltPath
	mMinRNR = hca.QPMaskMinRNRTimer
	mSQPSN  = hca.QPMaskSQPSN
	mDestRd = hca.QPMaskMaxDestRdAtomic
	mMig    = hca.QPMaskPathMigState
	mQPN    = hca.QPMaskDestQPN

	// toRTS is what may be given on the ways into RTS that need nothing.
	rcToRTS = mCur | mAccess | mAlt | mMig | mMinRNR // and an XRC target
	ucToRTS = mCur | mAccess | mAlt | mMig           // and an XRC initiator
	udToRTS = mCur | mQKey
)

// moves is the state table of IBTA 1.4 §10.3.1 as the kernel's
// ib_modify_qp_is_ok has it (core/verbs.c, qp_state_table). From every state
// the QP may also go to RESET, and from every one but RESET to ERR, with no
// attributes.
var moves = map[[2]hca.QPState]move{
	{hca.QPReset, hca.QPInitState}: {
		rc: transition{req: mPKey | mPort | mAccess},
		uc: transition{req: mPKey | mPort | mAccess},
		ud: transition{req: mPKey | mPort | mQKey},

		ini: transition{req: mPKey | mPort | mAccess},
		tgt: transition{req: mPKey | mPort | mAccess},
	},
	{hca.QPInitState, hca.QPInitState}: {
		rc: transition{opt: mPKey | mPort | mAccess},
		uc: transition{opt: mPKey | mPort | mAccess},
		ud: transition{opt: mPKey | mPort | mQKey},

		ini: transition{opt: mPKey | mPort | mAccess},
		tgt: transition{opt: mPKey | mPort | mAccess},
	},
	{hca.QPInitState, hca.QPRTR}: {
		rc: transition{req: mAV | mMTU | mQPN | mRQPSN | mDestRd | mMinRNR, opt: mAlt | mAccess | mPKey},
		uc: transition{req: mAV | mMTU | mQPN | mRQPSN, opt: mAlt | mAccess | mPKey},
		ud: transition{opt: mPKey | mQKey},

		ini: transition{req: mAV | mMTU | mQPN | mRQPSN, opt: mAlt | mAccess | mPKey},
		tgt: transition{req: mAV | mMTU | mQPN | mRQPSN | mDestRd | mMinRNR, opt: mAlt | mAccess | mPKey},
	},
	{hca.QPRTR, hca.QPRTS}: {
		rc: transition{req: mTmo | mRetry | mRNR | mSQPSN | mRd, opt: rcToRTS},
		uc: transition{req: mSQPSN, opt: ucToRTS},
		ud: transition{req: mSQPSN, opt: udToRTS},

		ini: transition{req: mTmo | mRetry | mRNR | mSQPSN | mRd, opt: ucToRTS},
		tgt: transition{req: mTmo | mSQPSN, opt: rcToRTS},
	},
	{hca.QPRTS, hca.QPRTS}: {
		rc: transition{opt: rcToRTS}, uc: transition{opt: ucToRTS}, ud: transition{opt: udToRTS},
		ini: transition{opt: ucToRTS}, tgt: transition{opt: rcToRTS},
	},
	{hca.QPRTS, hca.QPSQD}: {
		rc: transition{opt: mNotify}, uc: transition{opt: mNotify}, ud: transition{opt: mNotify},
		ini: transition{opt: mNotify}, tgt: transition{opt: mNotify},
	},
	{hca.QPSQD, hca.QPRTS}: {
		rc: transition{opt: rcToRTS}, uc: transition{opt: ucToRTS}, ud: transition{opt: udToRTS},
		ini: transition{opt: ucToRTS}, tgt: transition{opt: rcToRTS},
	},
	{hca.QPSQD, hca.QPSQD}: {
		rc: transition{opt: mPort | mAV | mTmo | mRetry | mRNR | mRd | mDestRd | mAlt | mAccess | mPKey | mMinRNR | mMig},
		uc: transition{opt: mAV | mAlt | mAccess | mPKey | mMig},
		ud: transition{opt: mPKey | mQKey},

		ini: transition{opt: mPort | mAV | mTmo | mRetry | mRNR | mRd | mAlt | mAccess | mPKey | mMig},
		tgt: transition{opt: mPort | mAV | mTmo | mDestRd | mAlt | mAccess | mPKey | mMinRNR | mMig},
	},
	{hca.QPSQE, hca.QPRTS}: {
		// RC and XRC do not get into SQE; the kernel's table has the cell with no
		// attributes for them.
		uc: transition{opt: mCur | mAccess}, ud: transition{opt: mCur | mQKey},
	},
}

// moveOK says whether a QP may go from one state to another with these
// attributes.
func moveOK(from, to hca.QPState, typ hca.QPType, mask hca.QPAttrMask) bool {
	var tr transition
	switch {
	case from > hca.QPErr || to > hca.QPErr:
		return false
	case to == hca.QPReset, to == hca.QPErr && from != hca.QPReset:
	default:
		m, ok := moves[[2]hca.QPState{from, to}]
		if !ok {
			return false
		}
		switch typ {
		case hca.QPTypeRC:
			tr = m.rc
		case hca.QPTypeUC:
			tr = m.uc
		case hca.QPTypeXRCIni:
			tr = m.ini
		case hca.QPTypeXRCTgt:
			tr = m.tgt
		default:
			tr = m.ud
		}
	}
	return mask&tr.req == tr.req && mask&^(tr.req|tr.opt|hca.QPMaskState) == 0
}

// canReceive: the states in which a QP takes messages.
func canReceive(s hca.QPState) bool {
	return s == hca.QPRTR || s == hca.QPRTS || s == hca.QPSQD || s == hca.QPSQE
}
